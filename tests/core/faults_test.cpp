// A crash says what it was, where and by which calls, and ends the process by the same signal.

#include <gtest/gtest.h>

#include <csignal>
#include <stdexcept>
#include <string>
#include <thread>

#include "core/faults.h"

namespace weft::crash {
namespace {

TEST(CrashDeathTest, SignalsSayWhereTheRankWas) {
  for (const int signal : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT})
    EXPECT_EXIT(
        {
          watch();
          at("step", std::int64_t{1} << 40);
          raise(signal);
        },
        testing::KilledBySignal(signal),
        "ERROR: ended by SIG[A-Z]+ \\(.*\\) in step 1099511627776\n.*HINT: (.*\n)+.*\\[0x");
}

TEST(CrashDeathTest, AnExceptionThatNobodyCatchesIsNamed) {
  EXPECT_EXIT(
      {
        watch();
        at("clip", "sample_3");
        std::thread([] { throw std::runtime_error("no more clips"); }).join();
      },
      testing::KilledBySignal(SIGABRT),
      "SIGABRT \\(uncaught exception\\) in clip sample_3: no more clips\n");
  EXPECT_EXIT(
      {
        watch();
        std::thread([] { throw 5; }).join();
      },
      testing::KilledBySignal(SIGABRT), "exception\\): of an unknown type\n");
}

TEST(Crash, APlaceIsAStepAClipOrNone) {
  EXPECT_EQ(place(), "");
  at("step", 12);
  EXPECT_EQ(place(), " in step 12");
  {
    std::string name = "sample_3";
    at("clip", name.c_str());
    name = "another!";
  }
  EXPECT_EQ(place(), " in clip sample_3") << "a name need not stay where it was";
  at("step", 13);
  EXPECT_EQ(place(), " in step 13");
  at(nullptr);
  EXPECT_EQ(place(), "");
}

}  // namespace
}  // namespace weft::crash
