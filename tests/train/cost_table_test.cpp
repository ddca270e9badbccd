#include "train/cost_table.h"

#include <gtest/gtest.h>

#include "core/error.h"

namespace weft {
namespace {

// Costs 10, 20, 30, ... of as many buckets, with `clips` in each micro-batch.
CostTable make(int buckets, std::int64_t clips = 2) {
  std::vector<CostTable::Planned> planned;
  for (int b = 0; b < buckets; ++b) planned.push_back({clips, 10.0 * (b + 1)});
  return CostTable(std::move(planned));
}

// The exchange among `tables`, as the trainer does it.
void exchange(const std::vector<CostTable*>& tables) {
  std::vector<double> sums;
  for (CostTable* t : tables) {
    const std::vector<double> own = t->take();
    sums.resize(own.size(), 0.0);
    for (std::size_t i = 0; i < own.size(); ++i) sums[i] += own[i];
  }
  for (CostTable* t : tables) t->agree(sums);
}

void measure(CostTable& t, int bucket, double seconds, int times) {
  for (int i = 0; i < times; ++i) t.measured(bucket, seconds);
}

// Whatever was measured: a time that decided who computes what would decide the last bits of every
// sum.
TEST(CostTable, PlacesByThePlanAlone) {
  CostTable t = make(3);
  measure(t, 0, 3, 5);
  measure(t, 2, 0.001, 5);
  exchange({&t});
  for (int b = 0; b < 3; ++b) EXPECT_EQ(t.cost(b), 10 * (b + 1));
  EXPECT_NEAR(t.expected(0), 3, 1e-12);
}

TEST(CostTable, ExpectsThePlanUntilSomethingIsMeasured) {
  CostTable t = make(3);
  EXPECT_EQ(t.expected(2), 30);
  exchange({&t});  // nothing was measured: nothing changes
  EXPECT_EQ(t.expected(2), 30);
  EXPECT_EQ(t.seconds(), std::vector<double>(3, 0.0));
}

TEST(CostTable, FirstTimesDoNotCountAndOutliersCountLittle) {
  CostTable t = make(1);
  t.measured(0, 50);  // cold
  measure(t, 0, 2.0, 9);
  t.measured(0, 20);  // held up tenfold: the mean of times would be 3.8
  exchange({&t});
  EXPECT_NEAR(t.expected(0), 10 / (9 / 2.0 + 1 / 20.0), 1e-12);
  EXPECT_LT(t.expected(0), 2.2);
}

TEST(CostTable, UnmeasuredBucketsFollowTheMeasured) {
  CostTable t = make(3);
  measure(t, 0, 0.5, 2);  // 10 -> 0.5 s
  measure(t, 1, 1.3, 2);  // 20 -> 1.3 s
  exchange({&t});
  EXPECT_DOUBLE_EQ(t.expected(0), 0.5);
  EXPECT_DOUBLE_EQ(t.expected(1), 1.3);
  EXPECT_DOUBLE_EQ(t.expected(2), 30 * 1.8 / 30);
}

TEST(CostTable, RanksAgree) {
  CostTable a = make(2), b = make(2);
  measure(a, 0, 1, 3);
  measure(b, 1, 5, 2);
  measure(b, 0, 3, 2);
  exchange({&a, &b});
  EXPECT_EQ(a.seconds(), b.seconds());
  EXPECT_DOUBLE_EQ(a.expected(0), 3 / (1 + 1 + 1 / 3.0));
  EXPECT_DOUBLE_EQ(a.expected(1), 5);
}

// Noise around a constant hardly shows; a machine that is twice as slow from some step on does,
// within a few exchanges.
TEST(CostTable, SmoothsNoiseAndFollowsDrift) {
  CostTable t = make(1);
  t.measured(0, 1);
  for (int round = 0; round < 20; ++round) {
    measure(t, 0, 0.9, 8);
    measure(t, 0, 1.1, 8);
    exchange({&t});
  }
  const double before = t.expected(0);
  EXPECT_NEAR(before, 1, 0.02);
  measure(t, 0, 1.2, 16);  // one noisy exchange
  exchange({&t});
  EXPECT_LT(t.expected(0), before + 0.25 * 0.2);
  for (int round = 0; round < 12; ++round) {
    measure(t, 0, 2, 16);
    exchange({&t});
  }
  EXPECT_NEAR(t.expected(0), 2, 0.1);
}

TEST(CostTable, DueOftenAtFirstThenSeldom) {
  const CostTable t = make(1);
  std::vector<std::int64_t> due;
  for (std::int64_t step = 0; step < 200; ++step)
    if (t.due(step)) due.push_back(step);
  EXPECT_EQ(due, (std::vector<std::int64_t>{3, 7, 15, 31, 49, 99, 149, 199}));
}

TEST(CostTable, TextGivesTheSameTimes) {
  CostTable t = make(3);
  measure(t, 0, 1.0 / 3, 4);
  measure(t, 1, 0.123456789, 4);
  exchange({&t});
  CostTable back = make(3);
  back.from_text(t.to_text());
  EXPECT_EQ(back.seconds(), t.seconds());
  EXPECT_EQ(back.to_text(), t.to_text());
}

// Less memory, and thus more recomputation, or a planner that counts otherwise: the run goes on as
// it began.
TEST(CostTable, ARestartPlacesAsTheRunBegan) {
  const CostTable t = make(2);
  CostTable back({{2, 17.0 / 3}, {2, 20}});
  back.from_text(t.to_text());
  EXPECT_EQ(back.cost(0), 10);
  EXPECT_EQ(back.cost(1), 20);
}

TEST(CostTable, OtherBatchesArePlannedAnew) {
  CostTable t = make(2);
  measure(t, 0, 1, 2);
  measure(t, 1, 2, 2);
  exchange({&t});
  CostTable back({{8, 40.0}, {2, 21}});
  back.from_text(t.to_text());
  EXPECT_EQ(back.cost(0), 40);
  EXPECT_EQ(back.cost(1), 21);
  EXPECT_EQ(back.seconds(), (std::vector<double>{0, 2}));
  EXPECT_EQ(CostTable::seconds_in(t.to_text(), 2), (std::vector<double>{1, 2}));
}

TEST(CostTable, DamagedTextIsRefused) {
  CostTable t = make(2);
  measure(t, 0, 1, 2);
  exchange({&t});
  const std::string good = t.to_text();
  const std::string bad[] = {"",
                             "weft costs 2\n",
                             "weft costs 3\n2\n2 10 0 0\n2 20 0 0\n",
                             good.substr(0, good.size() / 2),
                             "weft costs 2\n2\n2 10 -1 0\n2 20 0 0\n",
                             "weft costs 2\n2\n2 ten 1 0\n2 20 0 0\n",
                             "weft costs 1\n2 10 20\n",
                             make(3).to_text()};
  for (const std::string& text : bad) {
    try {
      make(2).from_text(text);
      ADD_FAILURE() << "accepted: " << text;
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), Exit::checkpoint);
    }
  }
}

}  // namespace
}  // namespace weft
