#include "train/cost_table.h"

#include <gtest/gtest.h>

#include <memory>

#include "core/error.h"

namespace weft {
namespace {

// Estimates 10, 20, 30, ... of as many buckets.
CostTable make(int buckets, bool deterministic = false, std::int64_t horizon = 0) {
  return CostTable(
      buckets, [](int b) { return 10.0 * (b + 1); }, deterministic, horizon);
}

// The exchange among `tables`, as the trainer does it.
void exchange(const std::vector<CostTable*>& tables, std::int64_t step) {
  std::vector<double> sums;
  for (CostTable* t : tables) {
    const std::vector<double> own = t->take();
    sums.resize(own.size(), 0.0);
    for (std::size_t i = 0; i < own.size(); ++i) sums[i] += own[i];
  }
  for (CostTable* t : tables) t->agree(step, sums);
}

void measure(CostTable& t, int bucket, double seconds, int times) {
  for (int i = 0; i < times; ++i) t.measured(bucket, seconds);
}

TEST(CostTable, TheEstimateUntilSomethingIsMeasured) {
  CostTable t = make(3);
  EXPECT_EQ(t.cost(0, 0), 10);
  EXPECT_EQ(t.cost(2, 1000), 30);
  exchange({&t}, 3);  // nothing was measured: nothing changes
  EXPECT_EQ(t.cost(2, 1000), 30);
}

TEST(CostTable, FirstTimesDoNotCountAndOutliersCountLittle) {
  CostTable t = make(1);
  t.measured(0, 50);  // cold
  measure(t, 0, 2.0, 9);
  t.measured(0, 20);  // held up tenfold: the mean of times would be 3.8
  exchange({&t}, 3);
  EXPECT_NEAR(t.cost(0, 4), 10 / (9 / 2.0 + 1 / 20.0), 1e-12);
  EXPECT_LT(t.cost(0, 4), 2.2);
}

TEST(CostTable, UnmeasuredBucketsFollowTheMeasured) {
  CostTable t = make(3);
  measure(t, 0, 0.5, 2);  // 10 -> 0.5 s
  measure(t, 1, 1.3, 2);  // 20 -> 1.3 s
  exchange({&t}, 3);
  EXPECT_DOUBLE_EQ(t.cost(0, 4), 0.5);
  EXPECT_DOUBLE_EQ(t.cost(1, 4), 1.3);
  EXPECT_DOUBLE_EQ(t.cost(2, 4), 30 * 1.8 / 30);
}

// A placement that was made once never changes: the prefetcher may have read for it.
TEST(CostTable, CountsBehindTheHorizonOnly) {
  CostTable t = make(2, false, 4);
  measure(t, 0, 7, 2);
  exchange({&t}, 3);
  for (std::int64_t step = 4; step < 8; ++step) EXPECT_EQ(t.cost(0, step), 10) << step;
  EXPECT_EQ(t.cost(0, 8), 7);
  measure(t, 0, 1, 1);
  exchange({&t}, 7);
  for (std::int64_t step = 8; step < 12; ++step) EXPECT_EQ(t.cost(0, step), 7) << step;
  EXPECT_LT(t.cost(0, 12), 7);
}

TEST(CostTable, RanksAgree) {
  CostTable a = make(2), b = make(2);
  measure(a, 0, 1, 3);
  measure(b, 1, 5, 2);
  measure(b, 0, 3, 2);
  exchange({&a, &b}, 3);
  for (int bucket = 0; bucket < 2; ++bucket) EXPECT_EQ(a.cost(bucket, 9), b.cost(bucket, 9));
  EXPECT_DOUBLE_EQ(a.cost(0, 9), 3 / (1 + 1 + 1 / 3.0));
  EXPECT_DOUBLE_EQ(a.cost(1, 9), 5);
}

// Noise around a constant hardly shows; a machine that is twice as slow from some step on does, within a few exchanges.
TEST(CostTable, SmoothsNoiseAndFollowsDrift) {
  CostTable t = make(1);
  t.measured(0, 1);
  std::int64_t step = 49;
  for (int round = 0; round < 20; ++round, step += 50) {
    measure(t, 0, 0.9, 8);
    measure(t, 0, 1.1, 8);
    exchange({&t}, step);
  }
  const double before = t.cost(0, step);
  EXPECT_NEAR(before, 1, 0.02);
  measure(t, 0, 1.2, 16);  // one noisy exchange
  exchange({&t}, step);
  EXPECT_LT(t.cost(0, step + 1), before + 0.25 * 0.2);
  for (int round = 0; round < 12; ++round) {
    step += 50;
    measure(t, 0, 2, 16);
    exchange({&t}, step);
  }
  EXPECT_NEAR(t.cost(0, step + 1), 2, 0.1);
}

TEST(CostTable, DueOftenAtFirstThenSeldom) {
  const CostTable t = make(1);
  std::vector<std::int64_t> due;
  for (std::int64_t step = 0; step < 200; ++step)
    if (t.due(step)) due.push_back(step);
  EXPECT_EQ(due, (std::vector<std::int64_t>{3, 7, 15, 31, 49, 99, 149, 199}));
}

TEST(CostTable, DeterministicPlacesByTheEstimateAndExpectsWhatWasMeasured) {
  CostTable t = make(2, true);
  measure(t, 0, 3, 5);
  exchange({&t}, 3);
  EXPECT_EQ(t.cost(0, 100), 10);
  EXPECT_NEAR(t.expected(0, 100), 3, 1e-12);
}

// A run that is saved between an exchange and the step from which it counts places alike when it goes on.
TEST(CostTable, TextGivesTheSameCosts) {
  CostTable t = make(3, false, 5);
  measure(t, 0, 1.0 / 3, 4);
  exchange({&t}, 3);
  measure(t, 1, 0.123456789, 4);
  exchange({&t}, 7);
  CostTable back = make(3, false, 5);
  back.from_text(t.to_text());
  for (std::int64_t step = 8; step < 20; ++step)
    for (int b = 0; b < 3; ++b) EXPECT_EQ(back.cost(b, step), t.cost(b, step)) << step;
  EXPECT_EQ(back.to_text(), t.to_text());
}

TEST(CostTable, ForgetsBucketsWhoseEstimateChanged) {
  CostTable t = make(2);
  measure(t, 0, 1, 2);
  measure(t, 1, 2, 2);
  exchange({&t}, 3);
  CostTable back(
      2, [](int b) { return b == 0 ? 40.0 : 20.0; }, false, 0);
  back.from_text(t.to_text());
  EXPECT_DOUBLE_EQ(back.cost(0, 4), 40 * 2.0 / 20);
  EXPECT_DOUBLE_EQ(back.cost(1, 4), 2);
}

TEST(CostTable, DamagedTextIsRefused) {
  CostTable t = make(2);
  measure(t, 0, 1, 2);
  exchange({&t}, 3);
  const std::string good = t.to_text();
  const std::string bad[] = {"",
                             "weft costs 2\n",
                             good.substr(0, good.size() / 2),
                             good + "8 nothing\n",
                             good + "2 1 1 1 1\n",
                             good + "9 -1 1 1 1\n",
                             make(3).to_text()};
  for (const std::string& text : bad) {
    try {
      make(2).from_text(text);
      FAIL() << "accepted: " << text;
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), Exit::checkpoint);
    }
  }
}

}  // namespace
}  // namespace weft
