// A crash says what it was, where and by which calls, and ends the process by the same signal.

#include <gtest/gtest.h>

#include <csignal>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <thread>

#include "core/error.h"
#include "core/faults.h"
#include "core/log.h"

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

TEST(CrashDeathTest, AnOverflowOfTheStackIsToldToo) {
  EXPECT_EXIT(
      {
        watch();
        // The handler would find no room on this stack: it has one of its own.
        setenv("WEFT_FAULT", "crash:0:3:5", 1);
        fault::crash_if_ordered(3);
      },
      testing::KilledBySignal(SIGSEGV), "ended by SIGSEGV");
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

namespace weft::fault {

// WEFT_FAULT is read as documented, holds for its rank and moment alone, and is refused where it
// cannot be read.
namespace {

class FaultTest : public ::testing::Test {
 protected:
  void TearDown() override {
    unsetenv("WEFT_FAULT");
    log::set_rank(0, 1);
  }
  static void order(const char* text) { setenv("WEFT_FAULT", text, 1); }
};

TEST_F(FaultTest, NothingIsOrderedWithoutTheVariable) {
  unsetenv("WEFT_FAULT");
  EXPECT_FALSE(ordered(Kind::stop, 0));
  order("");
  EXPECT_FALSE(ordered(Kind::stop, 0));
}

TEST_F(FaultTest, HoldsForItsRankKindAndMoment) {
  order("stop:2:30");
  EXPECT_FALSE(ordered(Kind::stop, 30)) << "this is rank 0";
  log::set_rank(2, 4);
  EXPECT_EQ(ordered(Kind::stop, 30), 0.0);
  EXPECT_FALSE(ordered(Kind::stop, 29));
  EXPECT_FALSE(ordered(Kind::stop, 31));
  EXPECT_FALSE(ordered(Kind::skip, 30));
  EXPECT_FALSE(ordered(Kind::slow, 30));
}

TEST_F(FaultTest, SlowStaysSlow) {
  order("slow:0:5:0.2");
  EXPECT_FALSE(ordered(Kind::slow, 4));
  EXPECT_EQ(ordered(Kind::slow, 5), 0.2);
  EXPECT_EQ(ordered(Kind::slow, 500), 0.2);
}

TEST_F(FaultTest, SeveralAtOnce) {
  order("nan:1:4:1,skip:0:57,flip:1:9,slow:1:0:1.5");
  EXPECT_EQ(ordered(Kind::skip, 57), 0.0);
  EXPECT_FALSE(ordered(Kind::flip, 9));
  log::set_rank(1, 2);
  EXPECT_EQ(ordered(Kind::nan, 4), 1.0);
  EXPECT_EQ(ordered(Kind::flip, 9), 0.0);
  EXPECT_EQ(ordered(Kind::slow, 0), 1.5);
  EXPECT_FALSE(ordered(Kind::skip, 57));
}

TEST_F(FaultTest, RefusesWhatItCannotRead) {
  for (const char* text : {"stop", "stop:1", "stop:1:2:3", "stop:-1:2", "stop:1:-2", "stop:x:2",
                           "stop:1:2x", "slow:1:2", "slow:1:2:-0.1", "slow:1:2:nan", "nan:0:1:2",
                           "halt:1:2", "stop:1:2,", ",stop:1:2", "stop:1:99999999999999999999"}) {
    order(text);
    try {
      ordered(Kind::stop, 0);
      ADD_FAILURE() << text << " was taken";
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), Exit::usage) << text;
      EXPECT_NE(std::string(e.what()).find("WEFT_FAULT holds"), std::string::npos) << e.what();
    }
  }
}

}  // namespace
}  // namespace weft::fault
