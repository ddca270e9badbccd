// How a process ends before its time: signals that ask it to stop, crashes, and faults that tests
// inject.
#pragma once

#include <array>
#include <atomic>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <optional>
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

// Fault injection, for tests of what the program does about them:
// WEFT_FAULT="KIND:RANK:AT[:VALUE][,...]" in the environment.
//   slow:RANK:STEP:FRACTION   the rank sleeps FRACTION of its compute time in every step from STEP
//                             on
//   stop:RANK:STEP            the rank's main thread sleeps for ever at STEP
//   skip:RANK:NUMBER          the rank leaves out its collective NUMBER (the first is 1)
//   flip:RANK:STEP            one bit of the rank's weights is flipped before STEP
//   nan:RANK:STEP:ONCE        a gradient of the rank becomes NaN in STEP; ONCE 1: not when the step
//                             is run again
//   crash:RANK:STEP:HOW       the rank ends: HOW 0 by SIGSEGV, 1 by abort(), 2 by an exception that
//                             its thread does not catch, 3 by a limit of memory that an allocation
//                             meets, 4 by SIGKILL as the system does for want of memory, 5 by a
//                             stack that overflows; in generate STEP is a clip's number
namespace weft::fault {

enum class Kind { slow, stop, skip, flip, nan, crash };

// The value of the fault of this kind that is due on this rank `at` (0 if it has none), or nothing.
// `slow` holds from its step on, the others at their step only. Exit::usage for a malformed
// WEFT_FAULT.
std::optional<double> ordered(Kind kind, std::int64_t at);

// Ends this process as `crash` says, if one is due here.
void crash_if_ordered(std::int64_t at);

}  // namespace weft::fault
