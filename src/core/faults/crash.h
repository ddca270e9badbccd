// Abnormal ends: a signal such as SIGSEGV, abort(), an uncaught exception. The rank reports the
// cause, its place in the job and the call stack in one piece, and then dies of the signal as it
// would have without a handler, upon which mpirun ends the other ranks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "core/error.h"

namespace weft::crash {

// Handles SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT and std::terminate. Call it before MPI_Init,
// which handles only signals that have no handler yet, and on the main thread, which gets a
// separate stack on which to report a stack overflow.
void watch();

// Sets this rank's place from here on, such as ("step", 12), or a clip by its name, which is
// copied. nullptr: none. For the main thread; costs a few stores.
void at(const char* what, std::int64_t number);
void at(const char* what, const char* name);
inline void at(std::nullptr_t) { at(nullptr, std::int64_t{0}); }

// " in step 12", or "" if no place is set.
std::string place();

// This rank ends with this exit code after so many seconds, whatever its threads wait for; alarm(0)
// takes it back.
void end_within(unsigned seconds, Exit code);

// From here on a request to stop (core/stop_signals.h) ends this rank at once, with this exit code.
void end_on_stop_signal(Exit code);

}  // namespace weft::crash
