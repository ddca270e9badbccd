#include "data/step_plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>

#include "core/error.h"

namespace weft {
namespace {

std::vector<Bucket> make_buckets(std::vector<std::int64_t> clips) {
  std::vector<Bucket> out;
  for (const std::int64_t n : clips) {
    Bucket b;
    b.name = std::to_string(out.size());
    b.frames = b.height = b.width = 4;
    b.clips = n;
    out.push_back(b);
  }
  return out;
}

std::vector<SampleId> samples_of(const std::vector<MicroBatch>& plan) {
  std::vector<SampleId> out;
  for (const MicroBatch& m : plan) out.insert(out.end(), m.samples.begin(), m.samples.end());
  return out;
}

TEST(StepPlan, EveryClipOnceAnEpoch) {
  const StepPlanner planner(make_buckets({12, 8, 20}), 4, 2, 7);
  ASSERT_EQ(planner.micro_batches_per_epoch(), 10);
  for (std::int64_t e = 0; e < 3; ++e) {
    std::set<SampleId> seen;
    for (std::int64_t s = 5 * e; s < 5 * (e + 1); ++s)
      for (const SampleId id : samples_of(planner.plan(s))) EXPECT_TRUE(seen.insert(id).second);
    EXPECT_EQ(seen.size(), 40u);
    EXPECT_EQ(*seen.rbegin(), 39);
  }
}

// Steps and epochs count in 64 bits: behind 2^31 and 2^32 an epoch still has every clip once, in an
// order of its own.
TEST(StepPlan, StepsBehind32Bits) {
  const StepPlanner planner(make_buckets({12, 8, 20}), 4, 2, 7);
  std::set<std::vector<SampleId>> orders;
  for (const std::int64_t e : {std::int64_t{0}, std::int64_t{1} << 31, (std::int64_t{1} << 32) + 1,
                               std::int64_t{1} << 40}) {
    std::vector<SampleId> order;
    for (std::int64_t s = 5 * e; s < 5 * (e + 1); ++s)
      for (const SampleId id : samples_of(planner.plan(s))) order.push_back(id);
    EXPECT_TRUE(orders.insert(order).second) << "epoch " << e << " repeats another";
    EXPECT_EQ(std::set<SampleId>(order.begin(), order.end()).size(), 40u) << "epoch " << e;
  }
}

TEST(StepPlan, FunctionOfTheStepAlone) {
  const auto buckets = make_buckets({13, 5, 9});
  const StepPlanner forward(buckets, 2, 3, 42), backward(buckets, 2, 3, 42);
  std::vector<std::vector<SampleId>> plans;
  for (std::int64_t s = 0; s < 30; ++s) plans.push_back(samples_of(forward.plan(s)));
  for (std::int64_t s = 29; s >= 0; --s)
    EXPECT_EQ(samples_of(backward.plan(s)), plans[s]) << "step " << s;
  const StepPlanner other(buckets, 2, 3, 43);
  EXPECT_NE(samples_of(other.plan(0)), plans[0]);
}

TEST(StepPlan, EpochsDiffer) {
  const StepPlanner planner(make_buckets({32}), 4, 8, 1);
  EXPECT_NE(samples_of(planner.plan(0)), samples_of(planner.plan(1)));
}

// A step may reach over the end of an epoch: no micro-batch is lost or taken twice there.
TEST(StepPlan, StepsCrossEpochs) {
  const StepPlanner planner(make_buckets({10}), 2, 3, 5);  // 5 micro-batches an epoch, 3 a step
  std::map<SampleId, int> times;
  for (std::int64_t s = 0; s < 5; ++s)
    for (const SampleId id : samples_of(planner.plan(s))) ++times[id];
  ASSERT_EQ(times.size(), 10u);
  for (const auto& [id, n] : times) EXPECT_EQ(n, 3) << "sample " << id;
}

TEST(StepPlan, TinyBucketsAreKept) {
  const StepPlanner planner(make_buckets({3, 0, 1, 9}), 4, 1, 5);
  ASSERT_EQ(planner.micro_batches_per_epoch(), 4);  // 3 clips, 1 clip, 2 of 4 (one is left out)
  std::map<int, std::size_t> clips;
  for (std::int64_t s = 0; s < 4; ++s) {
    const MicroBatch m = planner.plan(s).at(0);
    clips[m.bucket] += m.clips.size();
    for (std::size_t i = 0; i < m.clips.size(); ++i) {
      const std::int64_t first[] = {0, 3, 3, 4};
      EXPECT_EQ(m.samples[i], first[m.bucket] + m.clips[i]);
    }
  }
  EXPECT_EQ(clips, (std::map<int, std::size_t>{{0, 3}, {2, 1}, {3, 8}}));
}

// The clip that a remainder leaves out is another one from epoch to epoch.
TEST(StepPlan, RemainderChanges) {
  const StepPlanner planner(make_buckets({5}), 4, 1, 5);
  std::set<SampleId> seen;
  for (std::int64_t s = 0; s < 20; ++s)
    for (const SampleId id : samples_of(planner.plan(s))) seen.insert(id);
  EXPECT_EQ(seen.size(), 5u);
}

TEST(StepPlan, NothingToTrainOn) {
  EXPECT_THROW(StepPlanner(make_buckets({0, 0}), 4, 1, 5), Error);
  EXPECT_THROW(StepPlanner(make_buckets({4}), 0, 1, 5), Error);
  EXPECT_THROW(StepPlanner(make_buckets({4}), 1, 0, 5), Error);
}

TEST(StepPlan, BatchSizesOfBuckets) {
  const StepPlanner planner(make_buckets({12, 8, 5}), {4, 1, 9}, 1, 5);
  ASSERT_EQ(planner.micro_batches_per_epoch(), 3 + 8 + 1);
  std::map<int, std::multiset<std::size_t>> sizes;
  for (std::int64_t s = 0; s < 12; ++s) {
    const MicroBatch m = planner.plan(s).at(0);
    sizes[m.bucket].insert(m.clips.size());
  }
  EXPECT_EQ(sizes[0], (std::multiset<std::size_t>{4, 4, 4}));
  EXPECT_EQ(sizes[1], (std::multiset<std::size_t>{1, 1, 1, 1, 1, 1, 1, 1}));
  EXPECT_EQ(sizes[2], (std::multiset<std::size_t>{5}));
}

TEST(BatchSizes, TheLongestNameWins) {
  auto buckets = make_buckets({1, 1, 1, 1, 1});
  const char* names[] = {"256-1-0.56", "256-51-0.56", "256-51-1.00", "25", "720p-51-0.56"};
  for (std::size_t i = 0; i < buckets.size(); ++i) buckets[i].name = names[i];
  TrainDeck deck;
  deck.batch_size = 3;
  EXPECT_EQ(batch_sizes(deck, buckets), (std::vector<std::int64_t>{3, 3, 3, 3, 3}));
  deck.batch_sizes = {"256-51=20", "256=99", "256-51-1.00=7"};
  EXPECT_EQ(batch_sizes(deck, buckets), (std::vector<std::int64_t>{99, 20, 7, 3, 3}));
}

TEST(BatchSizes, BadEntries) {
  auto buckets = make_buckets({1, 1});
  buckets[0].name = "256-51-0.56";
  buckets[1].name = "720p-51-0.56";
  const std::pair<std::vector<std::string>, std::string> bad[] = {
      {{"256"}, "NAME=CLIPS"},    {{"256=0"}, "NAME=CLIPS"}, {{"=4"}, "NAME=CLIPS"},
      {{"256=4x"}, "NAME=CLIPS"}, {{"256="}, "NAME=CLIPS"},  {{"256=1", "256=2"}, "twice"},
      {{"256-5=2"}, "no bucket"}, {{"2=2"}, "no bucket"},    {{"720=2"}, "no bucket"}};
  for (const auto& [entries, what] : bad) {
    TrainDeck deck;
    deck.batch_sizes = entries;
    try {
      batch_sizes(deck, buckets);
      FAIL() << entries[0] << " was accepted";
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), Exit::usage);
      EXPECT_NE(std::string(e.what()).find(what), std::string::npos) << e.what();
      EXPECT_FALSE(e.hint().empty());
    }
  }
  TrainDeck deck;
  deck.batch_sizes = {"720=2"};
  try {
    batch_sizes(deck, buckets);
  } catch (const Error& e) {
    EXPECT_EQ(e.hint(), "did you mean \"720p\"?");
  }
}

// Where all ranks meet in each micro-batch, the costliest meet each other.
TEST(Owners, FollowTheMeetings) {
  const std::vector<double> cost = {1, 9, 2, 8, 3, 7}, two = {1, 9};
  EXPECT_EQ(owners(cost, 2, SyncMode::per_step), share_out(cost, 2));
  EXPECT_EQ(owners(cost, 2, SyncMode::lockstep), (std::vector<int>{0, 1, 0, 1, 0, 1}));
  EXPECT_EQ(owners(cost, 2, SyncMode::per_micro_batch), (std::vector<int>{1, 0, 0, 1, 1, 0}));
  EXPECT_EQ(owners(two, 3, SyncMode::per_micro_batch), share_out(two, 3))
      << "one each: as without meetings";
  for (const SyncMode m : {SyncMode::per_step, SyncMode::lockstep})
    EXPECT_EQ(order_of(cost, m), (std::vector<std::size_t>{0, 1, 2, 3, 4, 5}));
  EXPECT_EQ(order_of(cost, SyncMode::per_micro_batch),
            (std::vector<std::size_t>{1, 3, 5, 4, 2, 0}));
}

TEST(ShareOut, CostliestFirstToTheLeastLoaded) {
  const std::vector<double> cost = {1, 5, 4, 1, 3};
  // 5 -> 0, 4 -> 1, 3 -> 1, 1 -> 0, 1 -> 0
  EXPECT_EQ(share_out(cost, 2), (std::vector<int>{0, 0, 1, 0, 1}));
}

TEST(ShareOut, EqualCosts) {
  const std::vector<double> cost(7, 2.0);
  EXPECT_EQ(share_out(cost, 3), (std::vector<int>{0, 1, 2, 0, 1, 2, 0}));
  EXPECT_EQ(share_out(cost, 1), std::vector<int>(7, 0));
  EXPECT_TRUE(share_out({}, 4).empty());
}

// Longest first is within 4/3 of the optimum (Graham); the optimum is at least the mean.
TEST(ShareOut, Balanced) {
  std::vector<double> cost;
  double sum = 0;
  for (int i = 0; i < 64; ++i) sum += cost.emplace_back(1 + i * 37 % 11);
  const auto rank_of = share_out(cost, 8);
  std::vector<double> load(8);
  for (std::size_t i = 0; i < cost.size(); ++i) load[rank_of[i]] += cost[i];
  for (const double l : load) EXPECT_LE(l, 4.0 / 3.0 * sum / 8);
}

// Longest first leaves 12, 7, 4 beside 10, 9, 2, which no trade of one micro-batch evens out.
TEST(ShareOut, TwoRanksDivideAnew) {
  const std::vector<double> cost = {2, 4, 7, 9, 10, 12};
  const auto rank_of = share_out(cost, 2);
  double first = 0;
  for (std::size_t i = 0; i < cost.size(); ++i) first += rank_of[i] == 0 ? cost[i] : 0;
  EXPECT_EQ(std::max(first, 44 - first), 22);
}

// Costs of stage 1's buckets in seconds, in about the shares in which they come: longest first
// alone leaves eight micro-batches a rank more than 3 % apart.
TEST(ShareOut, TradesUntilRanksAreEven) {
  const std::vector<double> kinds = {2.297, 1.315, 1.315, 1.311, 1.255, 1.255, 1.255, 1.253,
                                     1.238, 1.179, 0.808, 0.808, 0.804, 0.797, 0.641};
  for (const int ranks : {8, 64}) {
    std::vector<double> cost;
    double sum = 0;
    for (int i = 0; i < 8 * ranks; ++i) sum += cost.emplace_back(kinds[i * 7 % 15]);
    const auto rank_of = share_out(cost, ranks);
    std::vector<double> load(ranks);
    for (std::size_t i = 0; i < cost.size(); ++i) load[rank_of[i]] += cost[i];
    EXPECT_LE(*std::max_element(load.begin(), load.end()), 1.015 * sum / ranks);
    EXPECT_EQ(share_out(cost, ranks), rank_of);
  }
}

}  // namespace
}  // namespace weft
