// Clips as parts, and how ranks share them.
#include "jobs/animate/parts.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <numeric>

namespace weft {
namespace {

using Kind = ClipPart::Kind;
using ::testing::ElementsAre;
using ::testing::IsEmpty;

// Clips of so many frames, in pieces of 10, and what they cost.
struct Clips {
  std::vector<ClipPart> parts;
  std::vector<std::int64_t> all;
  std::vector<ClipCost> costs;

  explicit Clips(const std::vector<std::int64_t>& frames) {
    std::vector<ClipSize> sizes;
    std::vector<ClipRequest> requests(frames.size());
    for (std::size_t i = 0; i < frames.size(); ++i) {
      sizes.push_back({frames[i], 64, 64});
      requests[i].animate.piece = 9;  // batches of 2 make it 10
      costs.push_back({5, 1, 0.5, frames[i]});
    }
    parts = parts_of(sizes, requests);
    all.resize(parts.size());
    std::iota(all.begin(), all.end(), 0);
  }
};

TEST(ClipParts, PiecesTileTheClipAndStandBeforeIt) {
  const Clips c({25, 0});
  ASSERT_EQ(c.parts.size(), 5u);
  EXPECT_EQ(c.parts[2].first, 20);
  EXPECT_EQ(c.parts[2].count, 5);
  EXPECT_EQ(c.parts[3].kind, Kind::clip);
  EXPECT_EQ(c.parts[3].count, 25);
  EXPECT_EQ(c.parts[4].count, 0);
  std::vector<ClipRequest> requests(2);
  requests[0].name = "a";
  requests[1].name = "b";
  const auto items = items_of(c.parts, requests, c.costs, {"k", "l"});
  EXPECT_EQ(items[2].name, "a/20-24");
  EXPECT_EQ(items[2].whole, 3);
  EXPECT_EQ(items[3].whole, -1);
  EXPECT_EQ(items[4].name, "b");
  EXPECT_EQ(items[4].key, "l");
}

TEST(ClipParts, OneRankTakesClipsWhole) {
  const Clips c({20, 30});
  // Parts: 0-1 pieces, 2 clip; 3-5 pieces, 6 clip. The longer clip comes first.
  const SharedParts shared = share_parts(c.parts, c.all, c.costs, 1);
  EXPECT_THAT(shared.pieces, ElementsAre(ElementsAre(3, 4, 5, 6), ElementsAre(0, 1, 2)));
  EXPECT_THAT(shared.joins, IsEmpty());
}

TEST(ClipParts, AClipOfMoreThanAnEvenShareIsSplit) {
  const Clips c({20, 30});
  const SharedParts shared = share_parts(c.parts, c.all, c.costs, 2);
  EXPECT_THAT(shared.pieces, ElementsAre(ElementsAre(3), ElementsAre(4), ElementsAre(5),
                                         ElementsAre(0), ElementsAre(1)));
  EXPECT_THAT(shared.joins, ElementsAre(ElementsAre(6), ElementsAre(2)));
}

TEST(ClipParts, OfManyClipsOnlyTheLastAreSplit) {
  const Clips c({20, 20, 20, 20, 20});
  const SharedParts shared = share_parts(c.parts, c.all, c.costs, 2);
  EXPECT_EQ(shared.pieces.size(), 6u);
  EXPECT_THAT(shared.pieces.front(), ElementsAre(0, 1, 2));
  EXPECT_THAT(shared.joins, ElementsAre(ElementsAre(14)));
}

TEST(ClipParts, OnlyWhatIsMissingIsShared) {
  const Clips c({20, 30});
  // All pieces of the second clip are there, and it has yet to be joined; so has one of the first.
  const SharedParts shared = share_parts(c.parts, {1, 2, 6}, c.costs, 2);
  EXPECT_THAT(shared.pieces, ElementsAre(ElementsAre(1, 2), ElementsAre(6)));
  EXPECT_THAT(shared.joins, IsEmpty());
}

}  // namespace
}  // namespace weft
