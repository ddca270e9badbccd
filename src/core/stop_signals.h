// The signals that ask a job to stop: SIGTERM, SIGINT, SIGUSR1. main holds them back before MPI
// starts its threads, which inherit that; so one that comes during start-up waits, either for the
// job's handler (train/stop.h) or for its release.
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
// Of this thread and those that it starts from now on.
inline void hold_stop_signals() { mask_stop_signals(SIG_BLOCK); }
// One that waited is delivered at once.
inline void release_stop_signals() { mask_stop_signals(SIG_UNBLOCK); }

}  // namespace weft
