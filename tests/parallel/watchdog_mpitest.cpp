// What the watch says of ranks that stopped, skipped or differ, and that it keeps still where
// nothing is wrong.
#include "parallel/watchdog.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <thread>
#include <vector>

#include "core/clock.h"
#include "core/error.h"
#include "parallel/communicator.h"
#include "tests/parallel/tensors.h"

namespace weft {
namespace {

using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

constexpr double limit = 1.0, generous = 300;
// Verdicts are promised within ten seconds after the limit; a host on which other tests run, too,
// may need more.
constexpr double patience = limit + 60;
constexpr Collective scatter{CollectiveKind::reduce_scatter, DType::f32, 1 << 20};
constexpr Collective gather{CollectiveKind::all_gather, DType::f32, 1 << 18};

// A watch over a transport that is made up: the test says which operation this rank is in. What
// leads up to a hang has all the time it needs: the limit holds from tick() on.
class WatchdogTest : public ::testing::Test {
 protected:
  void SetUp() override {
    MPI_Comm_rank(MPI_COMM_WORLD, &rank_);
    MPI_Comm_size(MPI_COMM_WORLD, &size_);
    watchdog_.emplace(
        MPI_COMM_WORLD, generous,
        [this]() -> std::optional<Watchdog::Operation> {
          const std::uint64_t n = pending_;
          if (n == 0) return std::nullopt;
          return Watchdog::Operation{n, now_seconds() - since_};
        },
        [this] { stopped_ = true; });
  }
  void TearDown() override {
    MPI_Barrier(MPI_COMM_WORLD);
    watchdog_.reset();
  }

  // Once all ranks are where the test wants them.
  void tick(double seconds = limit) {
    MPI_Barrier(MPI_COMM_WORLD);
    watchdog_->set_timeout(seconds);
  }
  void issue(std::uint64_t n, const Collective& c) { watchdog_->issued(n, c); }
  void enter(std::uint64_t n) {
    since_ = now_seconds();
    watchdog_->begun(n);
    pending_ = n;
  }
  void leave(std::uint64_t n) {
    pending_ = 0;
    watchdog_->completed(n);
  }
  // Sleeps, without a word to the watch, until the verdict is there.
  bool sleep_until_stopped(double seconds = patience) {
    for (const double start = now_seconds(); !stopped_;) {
      if (now_seconds() - start > seconds) return false;
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    return true;
  }
  // What every rank is told; empty if it is told nothing.
  std::string verdict() {
    if (!sleep_until_stopped()) return "";
    try {
      watchdog_->check();
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), Exit::hang);
      EXPECT_FALSE(e.hint().empty());
      return std::string(e.what()) + "\n" + e.below();
    }
    return "";
  }

  int rank_ = 0, size_ = 1;
  std::atomic<std::uint64_t> pending_ = 0;
  std::atomic<double> since_ = 0;
  std::atomic<bool> stopped_ = false;
  std::optional<Watchdog> watchdog_;
};

std::string cause(const std::string& report) { return report.substr(0, report.find('\n')); }

TEST_F(WatchdogTest, KeepsStillOutsideOfSteps) {
  watchdog_->progress(3, Phase::compute);
  watchdog_->progress(3, Phase::none);
  tick();
  EXPECT_FALSE(sleep_until_stopped(1.5 * limit));
  EXPECT_NO_THROW(watchdog_->check());
}

TEST_F(WatchdogTest, KeepsStillWithoutAnyWord) {
  tick();
  EXPECT_FALSE(sleep_until_stopped(1.5 * limit));
  EXPECT_NO_THROW(watchdog_->check());
}

// Moves that go on for longer than the limit, which is so long that a rank may stand still for
// seconds by itself.
TEST_F(WatchdogTest, KeepsStillWhileThingsMove) {
  constexpr double patient = 2.5 * limit;
  const auto go_on = [&](const std::function<void(int)>& move) {
    const double start = now_seconds();
    for (int i = 1; now_seconds() - start < 1.1 * patient; ++i) {
      move(i);
      std::this_thread::sleep_for(std::chrono::milliseconds(250));
    }
  };
  watchdog_->progress(0, Phase::compute);
  tick(patient);
  go_on([&](int n) {  // operations end, and no word of the main thread
    if (n > 1) leave(n - 1);
    issue(n, scatter);
    enter(n);
  });
  pending_ = 0;
  go_on([&](int step) { watchdog_->progress(step, Phase::compute); });  // and no operation
  watchdog_->progress(10, Phase::none);
  EXPECT_NO_THROW(watchdog_->check());
}

TEST_F(WatchdogTest, ALongerLimitHoldsAtOnce) {
  if (std::getenv("WEFT_COMM_TIMEOUT") != nullptr) GTEST_SKIP() << "the environment decides";
  tick(2 * limit);
  watchdog_->progress(0, Phase::compute);
  watchdog_->set_timeout(60);
  EXPECT_EQ(watchdog_->timeout(), 60);
  EXPECT_FALSE(sleep_until_stopped(2.5 * limit));
  watchdog_->progress(0, Phase::none);
}

// The last rank reads for longer than the limit; the others wait for it in a collective.
TEST_F(WatchdogTest, RanksAreAsPatientAsTheOneThatReads) {
  const int reader = size_ - 1;
  watchdog_->progress(7, rank_ == reader ? Phase::data : Phase::sums);
  issue(1, scatter);
  if (rank_ != reader) enter(1);
  tick();
  EXPECT_FALSE(sleep_until_stopped(3 * limit));
  // Once it has read, it is as late as any other.
  watchdog_->progress(7, Phase::sums);
  if (size_ == 1) return watchdog_->progress(7, Phase::none);
  EXPECT_THAT(cause(verdict()),
              HasSubstr("reduce-scatter 1 (f32, 1.000 MiB) did not end within 1 s"));
}

// On three ranks one neither reads nor judges, and knows only that it waits.
TEST_F(WatchdogTest, SoAreRanksThatDoNotJudge) {
  watchdog_->progress(7, rank_ == 0 ? Phase::data : Phase::sums);
  issue(1, scatter);
  if (rank_ != 0) enter(1);
  tick();
  EXPECT_FALSE(sleep_until_stopped(6 * limit));
  watchdog_->progress(7, Phase::none);
  if (rank_ != 0) leave(1);
}

TEST_F(WatchdogTest, ASaveMayTakeTenTimesAsLong) {
  // Rank 0 first: whoever notices, it has stood still for as long.
  if (rank_ == 0) watchdog_->progress(4, Phase::save);
  tick(0.3);
  if (rank_ != 0) watchdog_->progress(4, Phase::save);
  const std::string s = verdict();
  EXPECT_THAT(cause(s), HasSubstr("no progress for 3 s; late: rank 0 on "));
  EXPECT_THAT(cause(s), HasSubstr("in save of step 5 for "));
  EXPECT_THAT(cause(s), Not(ContainsRegex("step 5 for [012] s")));
}

// The last rank's main thread hangs in its forward; the others wait for it in a collective.
TEST_F(WatchdogTest, ARankStuckOutsideOfCollectives) {
  const int late = size_ - 1;
  watchdog_->progress(7, rank_ == late ? Phase::compute : Phase::sums);
  if (rank_ != late) {
    issue(1, scatter);
    enter(1);
  }
  tick();
  const std::string s = verdict();
  EXPECT_THAT(cause(s), HasSubstr(fmt::format("late: rank {} on ", late)));
  EXPECT_THAT(cause(s), HasSubstr("in compute of step 8 for "));
  if (size_ > 1) {
    EXPECT_THAT(s, HasSubstr("reduce-scatter 1 (f32, 1.000 MiB)\n"));
  }
  EXPECT_EQ(std::count(s.begin(), s.end(), '\n'), size_ + 1) << s;
}

// No collective anywhere: all ranks hang in their own business.
TEST_F(WatchdogTest, AllRanksStuck) {
  if (rank_ == 0) watchdog_->progress(2, Phase::compute);
  tick();
  if (rank_ != 0) watchdog_->progress(2, Phase::compute);
  const std::string s = verdict();
  EXPECT_THAT(cause(s), HasSubstr("no progress for 1 s; late: rank 0 on "));
  EXPECT_THAT(cause(s), HasSubstr("in compute of step 3 for "));
}

// One rank took another branch.
TEST_F(WatchdogTest, CollectivesThatDiffer) {
  if (size_ < 2) GTEST_SKIP() << "one rank agrees with itself";
  issue(1, scatter);
  enter(1);
  leave(1);
  issue(2, rank_ == size_ - 1 ? gather : scatter);
  issue(3, scatter);
  enter(2);
  tick();
  const std::string s = verdict();
  EXPECT_THAT(
      s, StartsWith(size_ == 2
                        ? "collective 2 differs: rank 0 has reduce-scatter (f32, 1.000 MiB), "
                          "rank 1 has all-gather (f32, 0.250 MiB); "
                        : fmt::format("collective 2 differs: rank {} has all-gather (f32, 0.250 "
                                      "MiB), the others reduce-scatter (f32, 1.000 MiB); ",
                                      size_ - 1)));
}

// The transport met a message it did not expect: nobody waits for the limit, and the states tell
// what it was.
TEST_F(WatchdogTest, ASuspicionIsExplainedByTheStates) {
  for (std::uint64_t n = 1; n <= 3; ++n) {
    issue(n, rank_ == 0 && n == 3 ? gather : scatter);
    enter(n);
    if (n < 3) leave(n);
  }
  MPI_Barrier(MPI_COMM_WORLD);
  if (rank_ == size_ - 1) watchdog_->suspect("a message of another collective");
  const std::string s = verdict();
  EXPECT_THAT(s, HasSubstr("a message of another collective"));
  if (size_ > 1) {
    EXPECT_THAT(s, StartsWith("collective 3 differs: rank 0 has all-gather (f32, 0.250 MiB), "));
  }
}

// An error of the transport is one rank's own, told as it is.
TEST_F(WatchdogTest, AFailureIsThrownAsItIs) {
  watchdog_->fail(std::make_exception_ptr(Error(Exit::hardware, "a cable is cut")));
  watchdog_->fail(std::make_exception_ptr(Error(Exit::data, "too late")));
  EXPECT_TRUE(stopped_);
  try {
    watchdog_->check();
    ADD_FAILURE() << "nothing was thrown";
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), Exit::hardware);
    EXPECT_STREQ(e.what(), "a cable is cut");
    EXPECT_FALSE(e.reported());
  }
}

// The same on the real transport. All ranks run `job` until the verdict is thrown.
std::string verdict_of(const std::function<void(Communicator&, int rank)>& job) {
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  const auto comm = make_mpi_communicator(MPI_COMM_WORLD, generous);
  try {
    job(*comm, rank);
    for (const double start = now_seconds(); now_seconds() - start < patience;) {
      comm->check();
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), Exit::hang) << e.what();
    EXPECT_TRUE(e.reported()) << "one rank tells it, before anybody ends the job";
    return std::string(e.what()) + "\n" + e.below();
  }
  return "";
}

TEST(HungCommunicator, ASkippedCollective) {
  int size = 0;
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  if (size < 2) GTEST_SKIP() << "one rank waits for nobody";
  const int late = size - 1;
  std::vector<float> v(300000, 1.0f);
  const std::string s = verdict_of([&](Communicator& comm, int rank) {
    for (int k = 0; k < 3; ++k) comm.wait(comm.all_reduce_sum(over(v)));
    const Communicator::Ticket last = rank != late ? comm.all_reduce_sum(over(v)) : 0;
    MPI_Barrier(MPI_COMM_WORLD);  // the limit holds once all are there
    comm.set_timeout(limit);
    if (rank != late) comm.wait(last);
  });
  EXPECT_THAT(cause(s), HasSubstr("all-reduce 4 (f32, 1.144 MiB) did not end within 1 s"));
  EXPECT_THAT(cause(s), HasSubstr(fmt::format("late: rank {} on ", late)));
  EXPECT_THAT(cause(s), HasSubstr(fmt::format("rank {} has 3", late)));
}

// A skipped one whose place another kind takes, and one of another size: neither may end in an
// error of MPI, nor pass.
TEST(HungCommunicator, AnotherKindInItsPlace) {
  int size = 0;
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  if (size < 2) GTEST_SKIP() << "one rank waits for nobody";
  std::vector<float> v(300000, 1.0f), w(4000, 1.0f);
  const std::string s = verdict_of([&](Communicator& comm, int rank) {
    comm.wait(comm.all_gather(over(v)));
    if (rank != size - 1) comm.all_reduce_sum(over(v));
    comm.wait(comm.all_gather(over(w)));
    comm.wait(comm.all_gather(over(w)));
  });
  EXPECT_THAT(s, StartsWith("collective 2 differs: "));
  EXPECT_THAT(cause(s), HasSubstr("all-reduce (f32, 1.144 MiB)"));
  EXPECT_THAT(cause(s), HasSubstr("all-gather (f32, 0.015 MiB)"));
}

TEST(HungCommunicator, AResizedCollective) {
  int size = 0;
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  if (size < 2) GTEST_SKIP() << "one rank waits for nobody";
  for (const std::size_t other : {200000U, 300016U}) {
    std::vector<float> v(300000, 1.0f), w(other, 1.0f);
    const std::string s = verdict_of([&](Communicator& comm, int rank) {
      comm.wait(comm.all_reduce_sum(over(v)));
      comm.wait(comm.all_reduce_sum(over(rank == size - 1 ? w : v)));
    });
    EXPECT_THAT(s, StartsWith("collective 2 differs: ")) << other;
  }
}

}  // namespace
}  // namespace weft
