// The feed's decisions on a clock of their own.
#include "jobs/score/tuner.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <queue>

namespace weft {
namespace {

FeedLimits limits(bool overlap) {
  FeedLimits l;
  l.overlap = overlap;
  l.most_bytes = std::size_t{1} << 40;
  return l;
}

using Law = std::function<double(std::int64_t)>;  // seconds of a batch

// Enough batches that the size settles.
std::int64_t settled_batch(FeedTuner& tuner, const Law& law) {
  for (int i = 0; i < 100; ++i) tuner.took_network(tuner.batch(), law(tuner.batch()));
  return tuner.batch();
}

TEST(FeedTuner, BatchesGrowWhileTheyPay) {
  // 5, 3.5, 2.75 ... 2.09 (32), 2.05 ms a frame (64): the last step gains 2.2 %.
  const Law overhead = [](std::int64_t b) {
    return 0.002 + 0.003 * static_cast<double>(b) * 2 / 3;
  };
  FeedTuner tuner(limits(true));
  EXPECT_EQ(tuner.batch(), 1);
  EXPECT_EQ(settled_batch(tuner, overhead), 16);
  FeedTuner proportional(limits(true));
  EXPECT_EQ(
      settled_batch(proportional, [](std::int64_t b) { return 0.005 * static_cast<double>(b); }),
      1);
  // A slow first batch of a size, which pays for its memory, does not count.
  FeedTuner cold(limits(true));
  std::int64_t last = 0;
  EXPECT_EQ(settled_batch(cold,
                          [&](std::int64_t b) {
                            const bool first = std::exchange(last, b) != b;
                            return overhead(b) * (first ? 50 : 1);
                          }),
            16);
}

TEST(FeedTuner, BatchesFitTheMemory) {
  const Law overhead = [](std::int64_t b) { return 1 + 1e-3 * static_cast<double>(b); };
  FeedLimits l = limits(true);
  l.fits = [](std::int64_t batch) { return batch <= 8; };
  FeedTuner device(l);
  EXPECT_EQ(settled_batch(device, overhead), 8);
  l = limits(true);
  l.frame_bytes = 100;
  l.most_bytes = 900;  // twice 4 frames, not twice 8
  FeedTuner host(l);
  EXPECT_EQ(settled_batch(host, overhead), 4);
  EXPECT_LE(host.ahead(64) * 100, 900);
  FeedTuner capped(limits(true));
  EXPECT_EQ(settled_batch(capped, overhead), 64);
}

TEST(FeedTuner, AsManyThreadsAsKeepTheNetworkBusy) {
  FeedTuner tuner(limits(true));
  EXPECT_EQ(tuner.workers(16), 16);  // nothing is known yet
  for (int i = 0; i < 50; ++i) {
    tuner.took_prepare(0.010, 0.002);
    tuner.took_finish(0.001);
    tuner.took_network(1, 0.005);
  }
  EXPECT_EQ(tuner.workers(16), 4);  // 1.2 x 13 / 5
  EXPECT_EQ(tuner.workers(2), 2);
  for (int i = 0; i < 200; ++i) tuner.took_prepare(0.0005, 0.0001);
  EXPECT_EQ(tuner.workers(16), 1);
  // In turns with the network, all threads prepare.
  FeedTuner turns(limits(false));
  turns.took_prepare(0.001, 0.001);
  turns.took_network(1, 1);
  EXPECT_EQ(turns.workers(8), 8);
}

struct Simulated {
  double network_busy = 0;  // share of the time, once things have settled
  double rate = 0;          // frames a second
};

// A network beside threads that take `host` seconds a frame, as Feed runs them: the main thread
// adds frames between two batches.
Simulated simulate(FeedTuner& tuner, int budget, double host, const Law& law) {
  std::vector<double> free_at(static_cast<std::size_t>(budget), 0);
  std::priority_queue<double, std::vector<double>, std::greater<>> ready;
  double now = 0, busy = 0, from = 0;
  std::int64_t frames = 0, before = 0;
  constexpr int batches = 600, warm = 300;
  for (int i = 0; i < batches; ++i) {
    if (i == warm) from = now, busy = 0, frames = 0;
    for (; before < tuner.ahead(budget); ++before) {
      const auto thread =
          std::min_element(free_at.begin(), free_at.begin() + tuner.workers(budget));
      *thread = std::max(*thread, now) + host;
      tuner.took_prepare(host, 0);
      ready.push(*thread);
    }
    const std::int64_t batch = tuner.batch();
    for (std::int64_t f = 0; f < batch; ++f) {
      now = std::max(now, ready.top());
      ready.pop();
    }
    const double seconds = law(batch);
    now += seconds;
    busy += seconds;
    before -= batch;
    frames += batch;
    tuner.took_network(batch, seconds);
    for (std::int64_t f = 0; f < batch; ++f) tuner.took_finish(0);
  }
  return {busy / (now - from), static_cast<double>(frames) / (now - from)};
}

TEST(FeedTuner, KeepsTheNetworkBusyOrReachesTheThreadsRate) {
  const Law wait = [](std::int64_t b) { return 0.005 * static_cast<double>(b); };
  // 200 frames/s wanted; four threads of 16 ms make 250.
  FeedTuner enough(limits(true));
  EXPECT_GE(simulate(enough, 4, 0.016, wait).network_busy, 0.95);
  // One thread of 24 ms makes 41.7, and that is what comes.
  FeedTuner few(limits(true));
  const Simulated bound = simulate(few, 1, 0.024, wait);
  EXPECT_NEAR(bound.rate, 1 / 0.024, 0.5);
  EXPECT_NEAR(bound.network_busy, 0.005 / 0.024, 0.01);
  // Batches that pay, and many threads.
  FeedTuner batches(limits(true));
  const Simulated s = simulate(
      batches, 16, 0.010, [](std::int64_t b) { return 0.004 + 0.0015 * static_cast<double>(b); });
  EXPECT_GE(batches.batch(), 16);
  EXPECT_GE(s.network_busy, 0.95);
}

TEST(FeedTuner, ReadsAhead) {
  FeedTuner turns(limits(false));
  EXPECT_EQ(turns.ahead(1), 1);
  EXPECT_EQ(turns.ahead(4), 8);
  FeedTuner beside(limits(true));
  EXPECT_EQ(beside.ahead(4), 2 + 8);
  FeedLimits tight = limits(true);
  tight.frame_bytes = 10;
  tight.most_bytes = 1;  // a frame at least
  EXPECT_EQ(FeedTuner(tight).ahead(4), 1);
}

}  // namespace
}  // namespace weft
