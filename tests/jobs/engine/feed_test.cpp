// Stages on virtual clocks: every frame once, errors, times, and how many threads and frames.
#include "jobs/engine/feed.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <optional>
#include <queue>
#include <set>
#include <stdexcept>
#include <thread>

namespace weft {
namespace {

FeedLimits limits(int threads = 65, bool on_gpu = true) {
  FeedLimits l;
  l.threads = threads;
  l.network_on_gpu = on_gpu;
  l.most_bytes = std::size_t{1} << 40;
  return l;
}

using Law = std::function<double(std::int64_t)>;  // seconds of a batch

TEST(FeedRules, TheNetworkTakesWhatIsReady) {
  FeedLimits l = limits();
  l.most_batch = 64;
  const FeedRules rules{l, {}};
  const std::vector<std::pair<std::int64_t, std::int64_t>> wanted = {
      {1, 1}, {3, 2}, {63, 32}, {64, 64}, {1000, 64}};
  for (const auto& [ready, batch] : wanted) EXPECT_EQ(rules.batch(ready), batch) << ready;
  EXPECT_EQ((FeedRules{limits(), {}}.batch(1000)), 1) << "of a network that takes one at a time";
}

TEST(FeedRules, LargeFramesAndShortListsAreNotReadFarAhead) {
  FeedLimits l = limits(17);
  l.most_bytes = 1000;
  EXPECT_EQ((FeedRules{l, {}, 100}.ahead()), 10);
  EXPECT_EQ((FeedRules{l, {}, 300}.ahead()), 3);
  l = limits(17);
  l.most_ahead = 2;
  EXPECT_EQ((FeedRules{l, {}}.ahead()), 2);
}

TEST(FeedRules, OnCoresReadersAreAsManyAsKeepTheNetworkBusy) {
  const auto measured = [](FeedLimits l, double host) {
    FeedTimes t;
    t.decode = host * 10 / 13;
    t.resize = host * 2 / 13;
    t.post_processing = host / 13;
    t.network = 0.005;
    return FeedRules{l, t};
  };
  EXPECT_EQ((FeedRules{limits(8, false), {}}.readers()), 8) << "nothing is known yet";
  FeedRules cpu = measured(limits(8, false), 0.013);
  EXPECT_EQ(cpu.readers(), 4);  // 1.2 x 13 / 5
  EXPECT_EQ(cpu.network_threads(), 5) << "three readers are always busy";
  cpu = measured(limits(8, false), 0.0006);
  EXPECT_EQ(cpu.readers(), 1);
  EXPECT_EQ(cpu.network_threads(), 8) << "a reader that is mostly idle takes no core";
  const FeedRules one = measured(limits(1, false), 1);
  EXPECT_EQ(one.readers(), 1);
  EXPECT_EQ(one.network_threads(), 1);
  const FeedRules gpu = measured(limits(17), 0.013);
  EXPECT_EQ(gpu.readers(), 16) << "one thread drives the GPU";
  EXPECT_EQ(gpu.network_threads(), 1);
}

struct Simulated {
  double network_busy = 0;   // share of the time, once things have settled
  double rate = 0;           // frames a second
  std::int64_t largest = 0;  // batch
};

// A network beside threads that take `host` seconds a frame, as Feed runs them: the main thread
// adds frames between two batches.
Simulated simulate(FeedRules rules, int budget, double host, const Law& law) {
  std::vector<double> free_at(budget, 0);
  std::priority_queue<double, std::vector<double>, std::greater<>> ready;
  double now = 0, busy = 0, from = 0;
  std::int64_t frames = 0, before = 0, largest = 0;
  constexpr int batches = 600, warm = 300;
  for (int i = 0; i < batches; ++i) {
    if (i == warm) from = now, busy = 0, frames = 0;
    for (; before < rules.ahead(); ++before) {
      const auto thread = std::min_element(free_at.begin(), free_at.begin() + rules.readers());
      *thread = std::max(*thread, now) + host;
      rules.times.decode += host;
      ready.push(*thread);
    }
    now = std::max(now, ready.top());
    std::int64_t there = 0;
    for (auto waiting = ready; !waiting.empty() && waiting.top() <= now; waiting.pop()) ++there;
    const std::int64_t batch = rules.batch(there);
    for (std::int64_t f = 0; f < batch; ++f) ready.pop();
    largest = std::max(largest, batch);
    const double seconds = law(batch);
    now += seconds;
    busy += seconds;
    before -= batch;
    frames += batch;
    rules.times.network += seconds;
  }
  return {busy / (now - from), static_cast<double>(frames) / (now - from), largest};
}

TEST(FeedRules, KeepsTheNetworkBusyOrReachesTheThreadsRate) {
  const Law wait = [](std::int64_t b) { return 0.005 * static_cast<double>(b); };
  // 200 frames/s wanted; four threads of 16 ms make 250.
  EXPECT_GE(simulate({limits(5), {}}, 4, 0.016, wait).network_busy, 0.95);
  // One thread of 24 ms makes 41.7, and that is what comes.
  const Simulated bound = simulate({limits(2), {}}, 1, 0.024, wait);
  EXPECT_NEAR(bound.rate, 1 / 0.024, 0.5);
  EXPECT_NEAR(bound.network_busy, 0.005 / 0.024, 0.01);
  // Batches that pay: the slower the network, the larger they get.
  FeedLimits l = limits(17);
  l.most_batch = 64;
  const Simulated s = simulate(
      {l, {}}, 16, 0.010, [](std::int64_t b) { return 0.004 + 0.0015 * static_cast<double>(b); });
  EXPECT_GE(s.largest, 4);
  EXPECT_GE(s.network_busy, 0.95);
}

TEST(FeedRules, ReadsAhead) {
  EXPECT_EQ((FeedRules{limits(1, false), {}}.ahead()), 2 + 2);
  EXPECT_EQ((FeedRules{limits(5), {}}.ahead()), 2 + 8);
  FeedLimits tight = limits(4);
  tight.most_bytes = 1;  // a frame at least
  EXPECT_EQ((FeedRules{tight, {}}.ahead()), 1);
}

struct Number : FeedUnit {
  explicit Number(int i) : value(i) {}
  int value;
};

// Stages that take virtual seconds on a clock that only they move.
class FakeWork : public FeedWork {
 public:
  Prepared prepare(FeedUnit& unit) override {
    const Running running(*this);
    const int i = static_cast<Number&>(unit).value;
    ++prepared;
    prepared.notify_all();
    if (i == throws_at) throw std::runtime_error("prepare");
    pass(0.003);
    return {0.002, 0.001, i != unreadable, 1};
  }
  double network(std::span<FeedUnit* const> units, int threads) override {
    if (before_network) before_network();
    for (FeedUnit* u : units) {
      const int i = static_cast<Number*>(u)->value;
      if (i == network_throws_at) throw std::runtime_error("network");
      EXPECT_TRUE(seen.insert(i).second);
    }
    threads_of_network.insert(threads);
    const double seconds = 0.010 * static_cast<double>(units.size());
    pass(seconds);
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
  std::atomic<int> running_ = 0;
  std::mutex mutex_;
  double clock_ = 0;
};

struct Fixture {
  Fixture(bool on_gpu, int threads, std::int64_t most_batch = 4) {
    FeedLimits l = limits(threads, on_gpu);
    l.most_batch = most_batch;
    prefetch.emplace(work, l, [this] { return work.now(); });
  }
  void run(int count) {
    for (int i = 0; i < count; ++i) prefetch->add(std::make_unique<Number>(i));
    prefetch->drain();
  }
  FakeWork work;
  std::optional<Feed> prefetch;
};

class FeedTest : public ::testing::TestWithParam<bool> {};
INSTANTIATE_TEST_SUITE_P(OnCpuAndGpu, FeedTest, ::testing::Bool());

TEST_P(FeedTest, EveryFrameOnce) {
  for (const int threads : {1, 2, 5}) {
    Fixture f(GetParam(), threads);
    f.run(100);
    EXPECT_EQ(f.work.seen.size(), 100);
    EXPECT_EQ(f.work.finished.size(), 100);
    EXPECT_LE(f.work.most_running, threads);
    EXPECT_EQ(f.prefetch->times().frames, 100);
    EXPECT_LE(*f.work.threads_of_network.rbegin(), GetParam() ? 1 : threads);
    f.prefetch->drain();  // of nothing
    f.prefetch->add(std::make_unique<Number>(1000));
    f.prefetch->drain();
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
  f.prefetch->add(std::make_unique<Number>(0));
  f.prefetch.reset();
  EXPECT_TRUE(f.work.seen.empty());
}

TEST_P(FeedTest, ReadersPrepareWhileTheNetworkRuns) {
  Fixture f(GetParam(), 1, 1);
  // The second batch does not end before its successors are prepared.
  int batches = 0;
  f.work.before_network = [&] {
    if (++batches != 2) return;
    for (int now = f.work.prepared; now < 4; now = f.work.prepared) f.work.prepared.wait(now);
  };
  f.run(40);
  EXPECT_EQ(f.work.finished.size(), 40);
}

// Clips that are read whole: two before the network, one in it, four behind it.
TEST(FeedMemory, FewFramesAreInMemory) {
  struct Count {
    std::atomic<int> now = 0, most = 0;
  };
  struct Held : FeedUnit {
    explicit Held(Count& c) : count(c) {
      for (int now = ++count.now, before = count.most; before < now;)
        if (count.most.compare_exchange_weak(before, now)) break;
    }
    ~Held() override { --count.now; }
    Count& count;
  };
  class Slow : public FeedWork {
   public:
    Prepared prepare(FeedUnit&) override { return {0, 0, true, 1}; }
    double network(std::span<FeedUnit* const>, int) override { return 1e-6; }
    double finish(FeedUnit&) override {
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
      return 0.002;
    }
  };
  FeedLimits l = limits(9);
  l.most_ahead = 2;
  Count count;
  Slow work;
  Feed feed(work, l);
  for (int i = 0; i < 100; ++i) feed.add(std::make_unique<Held>(count));
  feed.drain();
  EXPECT_EQ(count.now, 0);
  EXPECT_GE(count.most, 4);
  EXPECT_LE(count.most, 7);
}

TEST_P(FeedTest, TimesAreSums) {
  Fixture f(GetParam(), 1, 1);
  f.run(10);
  const FeedTimes t = f.prefetch->times();
  EXPECT_NEAR(t.decode, 0.020, 1e-9);
  EXPECT_NEAR(t.resize, 0.010, 1e-9);
  EXPECT_NEAR(t.network, 0.100, 1e-9);
  EXPECT_NEAR(t.network_core_seconds, GetParam() ? 0 : 0.100, 1e-9);
  EXPECT_NEAR(t.elapsed, 0.130, 1e-9) << "the virtual clock adds up what threads do at once";
  EXPECT_EQ(t.network_batches, 10);
  EXPECT_EQ(t.threads, 1);
}

// ---- Who waited for whom ----

FeedTimes times_of(double decode, double network, int cores) {
  FeedTimes t;
  t.budget = cores;
  t.frames = 100;
  t.decode = decode;
  t.resize = 0.1;
  t.network = network;
  t.network_core_seconds = 2 * network;
  t.elapsed = 10;
  return t;
}

TEST(FeedSummary, NamesWhatBoundsTheJob) {
  FeedSummary beside;
  beside.on_gpu = true;
  beside.add(times_of(9.9, 1, 1));
  beside.add(times_of(9.9, 1, 1));
  EXPECT_EQ(beside.bound(), "decode");
  EXPECT_NEAR(beside.rate(), 20, 1e-9);
  EXPECT_NEAR(beside.host_rate(), 20, 1e-9);
  EXPECT_NEAR(beside.network_rate(), 200, 1e-9);
  EXPECT_NEAR(beside.network_busy(), 0.1, 1e-9);
  EXPECT_EQ(beside.verdict(),
            "decode bounds the job: 20 frames/s on 2 cores; the network could do 200; the network "
            "was at work 10.0 % of the time");
  // On cores: one rank of two threads.
  FeedSummary turns;
  turns.add(times_of(0.9, 9, 2));
  EXPECT_EQ(turns.bound(), "network");
  EXPECT_NEAR(turns.network_rate(), 100 / 9.0, 1e-9);
  EXPECT_NEAR(turns.host_rate(), 200, 1e-9);
  EXPECT_THAT(turns.verdict(),
              testing::HasSubstr("the network bounds the job: 10 frames/s on 2 cores"));
  EXPECT_THAT(turns.verdict(), testing::HasSubstr("could do 200"));
}

TEST(FeedSummary, SharesComeBack) {
  const FeedTimes t = times_of(3, 4, 2);
  FeedSummary sum;
  sum.add(nlohmann::ordered_json(nlohmann::json(t)));
  sum.add(nlohmann::ordered_json::object());  // a rank that had nothing to do
  EXPECT_EQ(sum.ranks, 1);
  EXPECT_EQ(sum.cores, 2);
  EXPECT_EQ(sum.sum.frames, t.frames);
  EXPECT_EQ(sum.sum.decode, t.decode);
  EXPECT_EQ(sum.sum.network_core_seconds, t.network_core_seconds);
  EXPECT_EQ(sum.sum.elapsed, t.elapsed);
}

}  // namespace
}  // namespace weft
