// How the parts of clips are shared out.
#include "jobs/animate/plans.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <numeric>

namespace weft {
namespace {

using Kind = ClipPart::Kind;
using ::testing::ElementsAre;

// Clips of so many frames, in pieces of 10, and what they cost.
struct Clips {
  std::vector<ClipPart> parts;
  std::vector<std::int64_t> all;
  std::vector<ClipCost> costs;

  explicit Clips(const std::vector<std::int64_t>& frames, double prepare = 5) {
    std::vector<ClipSize> sizes;
    std::vector<ClipRequest> requests(frames.size());
    for (std::size_t i = 0; i < frames.size(); ++i) {
      sizes.push_back({frames[i], 64, 64});
      requests[i].animate.piece = 9;  // batches of 2 make it 10
      costs.push_back({prepare, 1, 0.5, frames[i]});
    }
    parts = parts_of(sizes, requests);
    all.resize(parts.size());
    std::iota(all.begin(), all.end(), 0);
  }
};

TEST(ClipParts, ThePiecesOfAClipTileItAndStandBeforeTheirWhole) {
  const Clips c({25, 0});
  ASSERT_EQ(c.parts.size(), 7u);
  EXPECT_EQ(c.parts[3].first, 20);
  EXPECT_EQ(c.parts[3].count, 5);
  EXPECT_EQ(c.parts[4].kind, Kind::join);
  EXPECT_EQ(c.parts[6].count, 0);
  std::vector<ClipRequest> requests(2);
  requests[0].name = "a";
  requests[1].name = "b";
  const auto items = items_of(c.parts, requests, c.costs, {"k", "l"});
  EXPECT_EQ(items[0].name, "a/prepared");
  EXPECT_EQ(items[3].name, "a/20-24");
  EXPECT_EQ(items[3].whole, 4);
  EXPECT_EQ(items[4].whole, -1);
  EXPECT_EQ(items[5].whole, 6);
  EXPECT_EQ(items[6].name, "b");
  EXPECT_EQ(items[6].key, "l");
}

TEST(ClipPlans, BatchesOfEachPlan) {
  const Clips c({20, 30});
  // Parts: 0 prepare, 1-2 pieces, 3 join; 4 prepare, 5-7 pieces, 8 join. The longer clip is first.
  EXPECT_THAT(lay_out(ClipPlan::clips, c.parts, c.all, c.costs, 2),
              ElementsAre(ElementsAre(4, 5, 6, 7, 8), ElementsAre(0, 1, 2, 3)));
  EXPECT_THAT(lay_out(ClipPlan::frames, c.parts, c.all, c.costs, 2),
              ElementsAre(ElementsAre(4, 5), ElementsAre(6), ElementsAre(7), ElementsAre(0, 1),
                          ElementsAre(2), ElementsAre(8), ElementsAre(3)));
  EXPECT_THAT(
      lay_out(ClipPlan::apart, c.parts, c.all, c.costs, 1),
      ElementsAre(ElementsAre(4), ElementsAre(0), ElementsAre(5), ElementsAre(6), ElementsAre(7),
                  ElementsAre(1), ElementsAre(8), ElementsAre(2), ElementsAre(3)));
  // What is finished is in no batch.
  EXPECT_THAT(lay_out(ClipPlan::frames, c.parts, {7, 8, 2, 3}, c.costs, 1),
              ElementsAre(ElementsAre(7), ElementsAre(2), ElementsAre(8), ElementsAre(3)));
}

TEST(ClipPlans, EveryPlanHasEveryPartOnce) {
  const Clips c({7, 100, 33, 0, 12});
  for (const ClipPlan plan : all_clip_plans)
    for (const int ranks : {1, 3, 50}) {
      std::vector<std::int64_t> found;
      for (const ItemBatch& b : lay_out(plan, c.parts, c.all, c.costs, ranks))
        found.insert(found.end(), b.begin(), b.end());
      std::ranges::sort(found);
      EXPECT_EQ(found, c.all) << name_of(plan) << " on " << ranks;
    }
}

TEST(ClipPlans, MakespanWaitsForPreparationsAndPieces) {
  const Clips c({40}, 5);
  const auto time = [&](ClipPlan plan, int ranks) {
    return makespan(lay_out(plan, c.parts, c.all, c.costs, ranks), c.parts, c.costs, ranks);
  };
  EXPECT_DOUBLE_EQ(time(ClipPlan::clips, 1), 5 + 40 + 0.5);
  EXPECT_DOUBLE_EQ(time(ClipPlan::clips, 4), 5 + 40 + 0.5);
  EXPECT_DOUBLE_EQ(time(ClipPlan::frames, 1), 5 + 40 + 0.5);
  // All four wait for the first one's preparation.
  EXPECT_DOUBLE_EQ(time(ClipPlan::frames, 4), 5 + 10 + 0.5);
}

TEST(ClipPlans, AutoTakesTheQuickest) {
  // As many clips as ranks: no piece has to wait.
  const Clips equal({40, 40});
  EXPECT_EQ(choose_plan("auto", equal.parts, equal.all, equal.costs, 2).plan, ClipPlan::clips);
  // One long clip: all ranks share it.
  const Clips single({100});
  EXPECT_EQ(choose_plan("auto", single.parts, single.all, single.costs, 4).plan, ClipPlan::frames);
  // Costly preparations of several clips go on beside each other.
  const Clips costly({60, 60, 60}, 60);
  const ChosenPlan chosen = choose_plan("auto", costly.parts, costly.all, costly.costs, 2);
  EXPECT_EQ(chosen.plan, ClipPlan::apart);
  EXPECT_LT(chosen.makespans[2], chosen.makespans[0]);
  EXPECT_LT(chosen.makespans[2], chosen.makespans[1]);
  EXPECT_THAT(chosen.why, ::testing::HasSubstr("apart, the quickest by estimate, on 2 ranks"));
  EXPECT_EQ(choose_plan("clips", costly.parts, costly.all, costly.costs, 2).plan, ClipPlan::clips);
}

}  // namespace
}  // namespace weft
