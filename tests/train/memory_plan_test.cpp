#include "train/memory_plan.h"
#include "models/stdit3/options.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "core/error.h"
#include "data/synthetic.h"
#include "models/stdit3/task.h"

namespace weft {
namespace {

using testing::HasSubstr;

// Two buckets, the second with 8 times the tokens of the first.
struct Small {
  Deck deck;
  std::unique_ptr<ClipSource> source = make_synthetic_source(
      "clips=8,frames=2,height=16,width=16,latent=1;clips=8,frames=4,height=32,width=32,latent=1");
  std::unique_ptr<Stdit3Task> task;
  Small() {
    deck.get<Stdit3Deck>().hidden_size = 64;
    deck.get<Stdit3Deck>().num_heads = 4;
    deck.get<Stdit3Deck>().depth = 3;
    deck.get<Stdit3Deck>().caption_channels = 16;
    deck.get<Stdit3Deck>().model_max_length = 8;
    task = std::make_unique<Stdit3Task>(deck);
    task->params().allocate(1 << 20, false, true);
  }
  std::vector<StepMemory> plan(std::size_t capacity, std::vector<std::int64_t> sizes = {2, 2}) {
    return plan_memory(*task, source->buckets(), sizes, capacity);
  }
  std::size_t bytes(int bucket, double recompute, std::int64_t clips = 2) {
    return plan_step_memory(*task, source->buckets()[bucket], clips, recompute).bytes;
  }
};

constexpr std::size_t plenty = std::size_t{1} << 40;

TEST(MemoryPlan, NothingIsRecomputedWhereAllFits) {
  Small s;
  const auto plan = s.plan(plenty);
  ASSERT_EQ(plan.size(), 2u);
  for (int b = 0; b < 2; ++b) {
    EXPECT_EQ(plan[b].recompute, 0);
    EXPECT_EQ(plan[b].bytes, s.bytes(b, 0));
  }
  EXPECT_GT(plan[1].bytes, 4 * plan[0].bytes);
}

// An arena in which so many bytes are usable.
std::size_t arena_for(std::size_t bytes) { return bytes + bytes / 31 + 32; }

// Every capacity between the two extremes: the bucket fits, holes included; fewer blocks do not;
// short clips pay nothing.
TEST(MemoryPlan, AsManyBlocksAsItTakes) {
  Small s;
  const double blocks = 6;
  std::vector<std::size_t> need;  // of the large bucket with so many blocks recomputed
  for (int count = 0; count <= 6; ++count) need.push_back(s.bytes(1, count / blocks));
  ASSERT_GT(need[0], need[5]);
  for (int count = 0; count <= 5; ++count) {
    // Holes take an eighth at most here.
    const std::size_t capacity = arena_for(need[count] * 9 / 8);
    const auto plan = s.plan(capacity);
    EXPECT_EQ(plan[0].recompute, 0);
    EXPECT_LE(plan[1].bytes, capacity);
    const auto taken = static_cast<int>(std::lround(plan[1].recompute * blocks));
    EXPECT_EQ(plan[1].bytes, need[taken]);
    EXPECT_LE(taken, count);
    for (int fewer = 0; fewer < taken; ++fewer)
      EXPECT_FALSE(plan_step_memory(*s.task, s.source->buckets()[1], 2, fewer / blocks,
                                    DeviceKind::cpu, capacity - capacity / 32)
                       .fits)
          << fewer << " blocks suffice";
    // The model rounds up to whole blocks; the share must not reach the next one.
    EXPECT_EQ(std::ceil(plan[1].recompute * blocks), taken);
  }
}

TEST(MemoryPlan, TheDecksShareIsTheLeast) {
  Small s;
  s.deck.model.recompute = 0.5;
  for (const StepMemory& m : s.plan(plenty)) EXPECT_NEAR(m.recompute, 0.5, 1e-12);
  s.deck.model.recompute = 1;
  for (const StepMemory& m : s.plan(plenty)) EXPECT_NEAR(m.recompute, 1, 1e-12);
}

// Optional activations: all where they fit, part of them, none; the dry run's peak is that of the
// plan and stays within the memory.
TEST(MemoryPlan, KeepsWhatFits) {
  Small s;
  const Bucket& large = s.source->buckets()[1];
  const auto plan = [&](std::size_t capacity) {
    return plan_memory(*s.task, s.source->buckets(), std::vector<std::int64_t>{2, 2}, capacity,
                       DeviceKind::cuda, true)[1];
  };
  const auto bytes = [&](std::size_t capacity, std::size_t kept) {
    return plan_step_memory(*s.task, large, 2, 0, DeviceKind::cuda, capacity, kept);
  };
  const std::size_t none = bytes(0, 0).bytes;
  const StepMemory all = plan(plenty);
  EXPECT_EQ(all.recompute, 0);
  // The activations of 6 blocks: [2 clips, 1024 tokens, 256], f32.
  EXPECT_GE(all.kept, std::size_t{6} * 2 * 1024 * 256 * 4);
  EXPECT_EQ(bytes(0, all.kept).bytes, all.bytes);
  EXPECT_GT(all.bytes, none);
  std::size_t before = 0;
  for (int part = 0; part <= 4; ++part) {
    const std::size_t capacity = arena_for(none * 9 / 8 + part * (all.bytes - none) / 4);
    const StepMemory some = plan(capacity);
    EXPECT_EQ(some.recompute, 0);
    EXPECT_LE(some.bytes, capacity - capacity / 32);
    EXPECT_GE(some.kept, before);
    EXPECT_LE(some.kept, all.kept);
    const MemoryNeed again = bytes(capacity - capacity / 32, some.kept);
    EXPECT_TRUE(again.fits);
    EXPECT_EQ(again.bytes, some.bytes);
    before = some.kept;
  }
  EXPECT_EQ(before, all.kept);
  const StepMemory half = plan(arena_for(none * 9 / 8 + (all.bytes - none) / 3));
  EXPECT_GT(half.kept, 0u);
  EXPECT_LT(half.kept, all.kept);
  // Where blocks are recomputed for lack of memory nothing is kept, nor where a dry run does not
  // ask for it, nor on the CPU.
  const StepMemory tight = plan(arena_for(none - 1));
  EXPECT_GT(tight.recompute, 0);
  EXPECT_EQ(tight.kept, 0u);
  for (const StepMemory& m : s.plan(plenty)) EXPECT_EQ(m.kept, 0u);
  for (const StepMemory& m :
       plan_memory(*s.task, s.source->buckets(), std::vector<std::int64_t>{2, 2}, plenty,
                   DeviceKind::cpu, true))
    EXPECT_EQ(m.kept, 0u);
}

TEST(MemoryPlan, ARestartKeepsNoMoreThanBefore) {
  std::vector<StepMemory> plan{{0, 100, 10}, {0, 100, 20}, {0, 100, 0}, {0, 100, 30}};
  std::vector<Bucket> buckets(4);
  for (std::size_t i = 0; i < 4; ++i) buckets[i].name = fmt::format("bucket {}", i);
  const std::string text = "10 bucket 0\n20 bucket 1\n0 bucket 2\n30 bucket 3\n";
  EXPECT_EQ(kept_text(plan, buckets), text);
  keep_as_before(plan, buckets, "");
  EXPECT_EQ(kept_text(plan, buckets), text);
  // Of other data a bucket may be at another place, or new.
  keep_as_before(plan, buckets, "40 bucket 1\n5 bucket 0\n7 gone\n");
  EXPECT_EQ(kept_text(plan, buckets), "5 bucket 0\n20 bucket 1\n0 bucket 2\n30 bucket 3\n");
}

TEST(MemoryPlan, BatchesAreNoLargerThanTheirBucket) {
  Small s;
  EXPECT_EQ(s.plan(plenty, {100, 2})[0].bytes, s.bytes(0, 0, 8));
}

TEST(MemoryPlan, RefusesWhatDoesNotFitAndNamesWhatDoes) {
  Small s;
  try {
    s.plan(arena_for(s.bytes(1, 5 / 6.0, 3) * 9 / 8), {2, 5});
    FAIL() << "accepted";
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), Exit::usage);
    EXPECT_THAT(e.what(), HasSubstr("5 clips of bucket"));
    EXPECT_THAT(e.hint(), HasSubstr("largest batches that fit: train.batch_sizes = ["));
    EXPECT_THAT(e.hint(), HasSubstr(s.source->buckets()[1].name + "=3"));
  }
  try {
    s.plan(s.bytes(1, 5 / 6.0, 1) - 1, {2, 5});
    FAIL() << "accepted";
  } catch (const Error& e) {
    EXPECT_THAT(e.hint(), HasSubstr("not even one clip fits of"));
  }
}

// A GPU's step is planned without a GPU: it has no absorbed cross attention, so the figures differ
// from the CPU's.
TEST(MemoryPlan, ForADeviceThatIsNotHere) {
  Small s;
  const auto plan = plan_memory(*s.task, s.source->buckets(), std::vector<std::int64_t>{2, 2},
                                plenty, DeviceKind::cuda);
  EXPECT_NE(plan[1].bytes, s.bytes(1, 0));
  EXPECT_GT(plan[1].bytes, 0u);
}

}  // namespace
}  // namespace weft
