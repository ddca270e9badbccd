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
#pragma once

#include <cstdint>
#include <optional>

namespace weft::fault {

enum class Kind { slow, stop, skip, flip, nan, crash };

// The value of the fault of this kind that is due on this rank `at` (0 if it has none), or nothing.
// `slow` holds from its step on, the others at their step only. Exit::usage for a malformed
// WEFT_FAULT.
std::optional<double> ordered(Kind kind, std::int64_t at);

// Ends this process as `crash` says, if one is due here.
void crash_if_ordered(std::int64_t at);

}  // namespace weft::fault
