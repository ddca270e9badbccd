// Faults of weft itself, at the places that it names (core/faults.h).
// WEFT_FAULT="KIND:RANK:AT[:VALUE][,...]":
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
#include "core/faults.h"

#include <sys/resource.h>

#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace {

using Clock = std::chrono::steady_clock;
using weft::fault::Place;

struct Fault {
  std::string kind;
  int rank = 0;
  std::int64_t at = 0;
  double value = 0;
  bool done = false;  // of a skip
};

std::vector<Fault> ordered_faults() {
  std::vector<Fault> faults;
  const char* all = std::getenv("WEFT_FAULT");
  std::istringstream orders(all == nullptr ? "" : all);
  for (std::string order; std::getline(orders, order, ',');) {
    char kind[8] = {};
    long long at = 0;
    Fault f;
    if (std::sscanf(order.c_str(), "%7[a-z]:%d:%lld:%lf", kind, &f.rank, &at, &f.value) < 3) {
      std::fprintf(stderr, "WEFT_FAULT holds \"%s\"\n", order.c_str());
      std::_Exit(99);
    }
    f.kind = kind;
    f.at = at;
    faults.push_back(f);
  }
  return faults;
}

// Neither inlined nor turned into a loop, so that each call uses some of the stack.
__attribute__((noinline)) int overflow(volatile int* above) {
  volatile int page[1024] = {above[0] + 1};
  if (page[0] == std::numeric_limits<int>::max())
    return 0;  // never reached: avoids a compiler warning
  return overflow(page) + page[0];
}

// Meets the same limit as a job under `ulimit -v`.
void run_out_of_memory() {
  rlimit limit{};
  getrlimit(RLIMIT_AS, &limit);
  limit.rlim_cur = 1;
  setrlimit(RLIMIT_AS, &limit);
  std::vector<std::vector<char>> taken;
  for (;;) taken.emplace_back(std::size_t{1} << 26);
}

void crash(int how) {
  switch (how) {
    case 0:
      raise(SIGSEGV);
      break;
    case 1:
      std::abort();
    case 2:
      std::thread([] { throw std::runtime_error("ordered by WEFT_FAULT"); }).join();
      break;
    case 3:
      run_out_of_memory();
      break;
    case 4:
      raise(SIGKILL);
      break;
    default: {
      volatile int bottom = 0;
      overflow(&bottom);
    }
  }
}

}  // namespace

extern "C" bool weft_fault(Place place, int rank, std::int64_t at) {
  static std::vector<Fault> faults = ordered_faults();
  // Places within a step do not tell its number. All of them are on the main thread.
  static std::int64_t step = -1;
  static Clock::time_point begun;
  if (faults.empty()) return false;
  if (place == Place::step) {
    step = at;
    begun = Clock::now();
  }
  for (Fault& f : faults) {
    if (f.rank != rank) continue;
    if (f.kind == "slow" && place == Place::computed && step >= f.at)
      std::this_thread::sleep_for(f.value * (Clock::now() - begun));
    if (f.kind == "stop" && place == Place::step && step == f.at)
      for (;;) std::this_thread::sleep_for(std::chrono::seconds(1));
    if (f.kind == "crash" && (place == Place::step || place == Place::clip) && at == f.at)
      crash(static_cast<int>(f.value));
    if (f.kind == "flip" && place == Place::weights && step == f.at) return true;
    if (f.kind == "nan" && place == Place::gradient && step == f.at) return true;
    if (f.kind == "nan" && place == Place::gradient_again && at == f.at && f.value == 0)
      return true;
    // What comes next gets the number of the one that was left out.
    if (f.kind == "skip" && place == Place::collective && at == f.at && !f.done)
      return f.done = true;
  }
  return false;
}
