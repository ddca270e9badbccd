// The rows that frames are rendered from: camera lists, and windows of 27 rows.
#include "models/sadtalker/render/windows.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <limits>

#include "core/error.h"

namespace weft::test {
namespace {

using testing::Each;
using testing::ElementsAre;
using testing::IsEmpty;

std::vector<double> camera(std::vector<std::int64_t> list, std::int64_t frames) {
  return camera_degrees(list, frames);
}

TEST(CameraDegrees, EndAStepBeforeTheLastValue) {
  EXPECT_THAT(camera({0, 30}, 5), ElementsAre(0, 7.5, 15, 22.5, 22.5));
}
TEST(CameraDegrees, PassThroughAllValuesAtOneSpeed) {
  // 40 degrees in four steps.
  EXPECT_THAT(camera({0, 20, 0}, 5), ElementsAre(0, 10, 20, 10, 10));
  EXPECT_THAT(camera({-10, 0, -30}, 5), ElementsAre(-10, 0, -10, -20, -20));
}
TEST(CameraDegrees, TurnAtAValueEvenBetweenFrames) {
  // 30 degrees in four steps of 7.5: 0, 7.5 of the first pair, then 10, 2.5, -5 of the second.
  EXPECT_THAT(camera({0, 10, -10}, 5), ElementsAre(0, 7.5, 10, 2.5, -5));
}
TEST(CameraDegrees, HoldStill) {
  EXPECT_THAT(camera({}, 4), IsEmpty());
  EXPECT_THAT(camera({15}, 3), ElementsAre(15, 15, 15));
  EXPECT_THAT(camera({15, 15}, 3), ElementsAre(15, 15, 15));
  EXPECT_THAT(camera({15, 40}, 1), ElementsAre(15));
  // The pause between equal neighbours takes no time.
  EXPECT_THAT(camera({0, 0, 30}, 5), ElementsAre(0, 7.5, 15, 22.5, 22.5));
}

// Rows whose values say which they are: column + 1000 row.
std::vector<float> numbered(std::int64_t rows, std::int64_t columns, float start = 0) {
  std::vector<float> v;
  for (std::int64_t t = 0; t < rows; ++t)
    for (std::int64_t c = 0; c < columns; ++c)
      v.push_back(start + static_cast<float>(c + 1000 * t));
  return v;
}

TEST(DrivingWindows, RepeatTheEnds) {
  const DrivingRows rows = driving_rows({}, numbered(20, 70), numbered(1, 70));
  const std::vector<float> all = driving_windows(rows, 0, 20);
  ASSERT_EQ(all.size(), 20u * 27 * 70);
  for (std::int64_t t = 0; t < 20; ++t)
    for (std::int64_t i = 0; i < 27; ++i) {
      const std::int64_t row = std::clamp<std::int64_t>(t - 13 + i, 0, 19);
      EXPECT_EQ(all[static_cast<std::size_t>((t * 27 + i) * 70 + 5)],
                static_cast<float>(5 + 1000 * row));
    }
  const std::vector<float> some = driving_windows(rows, 7, 2);
  EXPECT_TRUE(std::equal(some.begin(), some.end(), all.begin() + 7 * 27 * 70));
}

TEST(DrivingRows, ScaleTheExpressionAlone) {
  SadtalkerDeck deck;
  deck.expression_scale = 2;
  const DrivingRows rows = driving_rows(deck, numbered(3, 70), numbered(1, 70, 7));
  EXPECT_EQ(rows.values[70 + 63], 2 * 1063.0f);
  EXPECT_EQ(rows.values[70 + 64], 1064.0f);
}

TEST(DrivingRows, TakeTheSourcesPlace) {
  SadtalkerDeck deck;
  deck.preprocess = "full";
  const std::vector<float> source = numbered(1, 73, 0.5f);
  const DrivingRows moving = driving_rows(deck, numbered(2, 70), source);
  ASSERT_EQ(moving.columns, 73);
  EXPECT_EQ(moving.values[73 + 69], 1069.0f);
  EXPECT_EQ(moving.values[73 + 72], 72.5f);
  deck.still = true;
  const DrivingRows still = driving_rows(deck, numbered(2, 70), source);
  EXPECT_EQ(still.values[73 + 63], 1063.0f);
  EXPECT_EQ(still.values[73 + 64], 64.5f);
  EXPECT_EQ(still.values[73 + 72], 72.5f);
}

TEST(DrivingRows, RefuseWhatDoesNotFit) {
  SadtalkerDeck deck;
  EXPECT_THROW(driving_rows(deck, numbered(1, 69), numbered(1, 70)), Error);
  EXPECT_THROW(driving_rows(deck, {}, numbered(1, 70)), Error);
  EXPECT_THROW(driving_rows(deck, numbered(1, 70), numbered(1, 73)), Error);
  std::vector<float> broken = numbered(2, 70);
  broken[75] = std::numeric_limits<float>::quiet_NaN();
  EXPECT_THROW(driving_rows(deck, broken, numbered(1, 70)), Error);
}

}  // namespace
}  // namespace weft::test
