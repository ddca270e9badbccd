// How a process ends before its time: signals that ask it to stop, crashes, and faults that tests
// order.
#pragma once

#include <array>
#include <atomic>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <string>

#include "core/error.h"

namespace weft {

// The signals that ask a job to stop: of schedulers and people, a terminal that is closed (nohup
// ignores that one), a limit of processor time. main blocks them first of all, before MPI starts
// its threads, which inherit the mask; a signal that arrives during start-up stays pending until
// the job installs its handler (train/stop.h) or unblocks it.
inline constexpr std::array<int, 6> stop_signals{SIGTERM, SIGINT,  SIGUSR1,
                                                 SIGUSR2, SIGXCPU, SIGHUP};
// The first that the job's handler received, 0 if none.
inline std::atomic<int> stop_received = 0;

inline void mask_stop_signals(int how) {
  sigset_t set;
  sigemptyset(&set);
  for (const int signal : stop_signals) sigaddset(&set, signal);
  pthread_sigmask(how, &set, nullptr);
}
// Blocks them for this thread and those that it starts from now on.
inline void block_stop_signals() { mask_stop_signals(SIG_BLOCK); }
// A pending signal is delivered at once.
inline void unblock_stop_signals() { mask_stop_signals(SIG_UNBLOCK); }

}  // namespace weft

// Crashes: a signal such as SIGSEGV, abort(), an uncaught exception. The rank reports the cause,
// its place in the job and the call stack in one piece, and then dies of the signal as it would
// have without a handler, upon which mpirun ends the other ranks.
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

// From here on a request to stop ends this rank at once, with this exit code.
void end_on_stop_signal(Exit code);

}  // namespace weft::crash

// Faults that tests order: places at which a library that they preload (tests/shim/faults.cpp) ends
// the process, keeps it waiting, or wants something to go wrong. Without it nothing happens here.
namespace weft::fault {

enum class Place {
  step,            // `number` begins
  weights,         // before the step: a bit of this rank's is to flip
  gradient,        // within the step: one of this rank's is to become NaN
  gradient_again,  // the same while step `number` is run again
  computed,        // the step's forward and backward are done
  collective,      // `number` of this rank, which is to leave it out
  clip             // `number` is to be made
};

bool is_possible();  // with that library
// This rank comes to a place. True: something is to go wrong.
bool at(Place place, std::int64_t number = 0);

}  // namespace weft::fault
