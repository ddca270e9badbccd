// The signals that ask a job to stop: SIGTERM, SIGINT, SIGUSR1. main blocks them before MPI starts
// its threads, which inherit the mask; a signal that arrives during start-up stays pending until
// the job installs its handler (train/stop.h) or unblocks it.
#pragma once

#include <array>
#include <csignal>

namespace weft {

inline constexpr std::array<int, 3> stop_signals{SIGTERM, SIGINT, SIGUSR1};

inline void mask_stop_signals(int how) {
  sigset_t set;
  sigemptyset(&set);
  for (const int signal : stop_signals) sigaddset(&set, signal);
  pthread_sigmask(how, &set, nullptr);
}
// Blocks them for this thread and those that it starts from now on.
inline void hold_stop_signals() { mask_stop_signals(SIG_BLOCK); }
// A pending signal is delivered at once.
inline void release_stop_signals() { mask_stop_signals(SIG_UNBLOCK); }

}  // namespace weft
