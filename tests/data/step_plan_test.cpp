#include "data/step_plan.h"

#include <gtest/gtest.h>

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

TEST(StepPlan, FunctionOfTheStepAlone) {
  const auto buckets = make_buckets({13, 5, 9});
  const StepPlanner forward(buckets, 2, 3, 42), backward(buckets, 2, 3, 42);
  std::vector<std::vector<SampleId>> plans;
  for (std::int64_t s = 0; s < 30; ++s) plans.push_back(samples_of(forward.plan(s)));
  for (std::int64_t s = 29; s >= 0; --s)
    EXPECT_EQ(samples_of(backward.plan(s)), plans[static_cast<std::size_t>(s)]) << "step " << s;
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
  for (std::size_t i = 0; i < cost.size(); ++i)
    load[static_cast<std::size_t>(rank_of[i])] += cost[i];
  for (const double l : load) EXPECT_LE(l, 4.0 / 3.0 * sum / 8);
}

}  // namespace
}  // namespace weft
