#include "jobs/score/feed.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <optional>
#include <set>
#include <stdexcept>

namespace weft {
namespace {

// Cores of one rank, and how many of them are held.
class FakeCores : public Cores {
 public:
  explicit FakeCores(int cores) : cores_(cores) {}
  int budget() override { return cores_; }
  int take(int most, int) override {
    const int got = std::min(most, cores_ - held.load());
    EXPECT_GT(got, 0) << "more threads than cores";
    held += got;
    return got;
  }
  void give(int count) override { held -= count; }
  void set_at_work(bool now) override { at_work = now; }

  std::atomic<int> held = 0;
  std::atomic<bool> at_work = false;

 private:
  int cores_;
};

struct Number : FeedUnit {
  explicit Number(int i) : value(i) {}
  int value;
};

// Stages that take virtual seconds on a clock that only they move.
class FakeWork : public FeedWork {
 public:
  explicit FakeWork(bool overlap) : overlap_(overlap) {}

  Prepared prepare(FeedUnit& unit) override {
    const Running running(*this);
    EXPECT_TRUE(overlap_ || !in_network) << "a thread runs beside the network";
    const int i = static_cast<Number&>(unit).value;
    ++prepared;
    prepared.notify_all();
    if (i == throws_at) throw std::runtime_error("prepare");
    pass(0.003);
    return {0.002, 0.001, i != unreadable};
  }
  double network(std::span<FeedUnit* const> units, int threads) override {
    in_network = true;
    EXPECT_TRUE(overlap_ || running_ == 0) << "the network runs beside a thread";
    if (before_network) before_network();
    for (FeedUnit* u : units) {
      const int i = static_cast<Number*>(u)->value;
      if (i == network_throws_at) throw std::runtime_error("network");
      EXPECT_TRUE(seen.insert(i).second);
    }
    threads_of_network.insert(threads);
    const double seconds = 0.010 * static_cast<double>(units.size());
    pass(seconds);
    in_network = false;
    return seconds;
  }
  double finish(FeedUnit& unit) override {
    const Running running(*this);
    const std::lock_guard lock(mutex_);
    EXPECT_TRUE(finished.insert(static_cast<Number&>(unit).value).second);
    return 0;
  }
  double now() {
    const std::lock_guard lock(mutex_);
    return clock_;
  }

  int unreadable = -1, throws_at = -1, network_throws_at = -1;
  std::function<void()> before_network;
  std::atomic<int> prepared = 0, most_running = 0;
  std::atomic<bool> in_network = false;
  std::set<int> seen, finished, threads_of_network;

 private:
  struct Running {
    explicit Running(FakeWork& w) : work(w) {
      const int now = ++work.running_;
      for (int most = work.most_running; most < now;)
        if (work.most_running.compare_exchange_weak(most, now)) break;
    }
    ~Running() { --work.running_; }
    FakeWork& work;
  };
  void pass(double seconds) {
    const std::lock_guard lock(mutex_);
    clock_ += seconds;
  }
  const bool overlap_;
  std::atomic<int> running_ = 0;
  std::mutex mutex_;
  double clock_ = 0;
};

struct Fixture {
  Fixture(bool overlap, int cores_of_host, std::int64_t most_batch = 4)
      : work(overlap), cores(cores_of_host) {
    FeedLimits l;
    l.overlap = overlap;
    l.most_batch = most_batch;
    l.most_bytes = std::size_t{1} << 40;
    feed.emplace(work, cores, l, [this] { return work.now(); });
  }
  void run(int count) {
    for (int i = 0; i < count; ++i) feed->add(std::make_unique<Number>(i));
    feed->drain();
  }
  FakeWork work;
  FakeCores cores;
  std::optional<Feed> feed;
};

class FeedTest : public ::testing::TestWithParam<bool> {};
INSTANTIATE_TEST_SUITE_P(OnTheCpuAndBeside, FeedTest, ::testing::Bool());

TEST_P(FeedTest, EveryFrameOnceAndNeverMoreThreadsThanCores) {
  for (const int cores : {1, 2, 5}) {
    Fixture f(GetParam(), cores);
    f.run(100);
    EXPECT_EQ(f.work.seen.size(), 100);
    EXPECT_EQ(f.work.finished.size(), 100);
    EXPECT_LE(f.work.most_running, cores);
    EXPECT_EQ(f.cores.held, 0);
    EXPECT_FALSE(f.cores.at_work);
    EXPECT_EQ(f.feed->times().frames, 100);
    EXPECT_EQ(f.work.threads_of_network, std::set<int>{GetParam() ? 1 : cores});
    f.feed->drain();                              // of nothing
    f.feed->add(std::make_unique<Number>(1000));  // and on: work that another rank has left
    f.feed->drain();
    EXPECT_EQ(f.work.finished.size(), 101);
  }
}

TEST_P(FeedTest, FramesThatCannotBeReadDoNotHoldUpTheOthers) {
  for (const int count : {1, 2, 7}) {
    Fixture f(GetParam(), 2);
    f.work.unreadable = count - 1;  // also as the last one, for which the network waits
    f.run(count);
    EXPECT_EQ(f.work.finished.size(), static_cast<std::size_t>(count - 1));
  }
}

TEST_P(FeedTest, ErrorsReachTheOwner) {
  for (const bool in_network : {false, true}) {
    Fixture f(GetParam(), 2);
    (in_network ? f.work.network_throws_at : f.work.throws_at) = 20;
    EXPECT_THROW(f.run(100), std::runtime_error);
  }
}

TEST_P(FeedTest, WhatIsOnItsWayIsDropped) {
  Fixture f(GetParam(), 2);
  f.feed->add(std::make_unique<Number>(0));
  f.feed.reset();
  EXPECT_EQ(f.cores.held, 0);
}

TEST(Feed, ThreadsPrepareBesideADevice) {
  Fixture f(true, 1, 1);
  // The second batch does not end before its successors are prepared.
  int batches = 0;
  f.work.before_network = [&] {
    if (++batches != 2) return;
    for (int now = f.work.prepared; now < 4; now = f.work.prepared) f.work.prepared.wait(now);
  };
  f.run(40);
  EXPECT_EQ(f.work.finished.size(), 40);
}

TEST(Feed, TimesOfASingleThread) {
  Fixture f(false, 1, 1);
  f.run(10);
  const FeedTimes t = f.feed->times();
  EXPECT_NEAR(t.decode, 0.020, 1e-9);
  EXPECT_NEAR(t.resize, 0.010, 1e-9);
  EXPECT_NEAR(t.network, 0.100, 1e-9);
  EXPECT_NEAR(t.network_cores, 0.100, 1e-9);
  EXPECT_NEAR(t.elapsed, 0.130, 1e-9);
  EXPECT_NEAR(t.network_waited, 0.030, 1e-9);
  EXPECT_NEAR(t.core_waited, 0, 1e-9);
  EXPECT_EQ(t.batches, 10);
  EXPECT_EQ(t.budget, 1);
}

}  // namespace
}  // namespace weft
