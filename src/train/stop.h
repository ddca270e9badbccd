// Requests to stop: SIGTERM, SIGINT and SIGUSR1 set a flag that the step loop agrees on between ranks.
#pragma once

namespace weft {

// Installs the handlers, on a thread of their own: call it before any thread that computes is started. A second SIGTERM or SIGINT ends the process at once with 64 + signal: the
// checkpoint before stays as it is.
void watch_stop_signals();
// The first signal received, 0 if none.
int stop_signal();

}  // namespace weft
