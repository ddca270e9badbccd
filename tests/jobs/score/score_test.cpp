#include "jobs/score/score.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "jobs/engine/manifest.h"

namespace weft {
namespace {

using ::testing::ElementsAre;
using ::testing::Pair;

TEST(ScoreSummary, Bins) {
  ScoreSummary s;
  EXPECT_TRUE(s.bins().empty());
  s.histogram = {{0, 10}, {4, 1}, {5, 2}, {8, 3}, {9, 4}};
  EXPECT_THAT(s.bins(), ElementsAre(Pair("0", 10), Pair("1", 0), Pair("2", 0), Pair("3", 0),
                                    Pair("4", 1), Pair("5 to 8", 5), Pair("9 to 16", 4)));
  EXPECT_EQ(s.with_text(), 10);
}

TEST(Regions, CoveredShare) {
  const TextBox square{{1, 1, 3, 1, 3, 3, 1, 3}, 1}, same = square;
  EXPECT_NEAR(covered_share(std::vector{square, same}, 10), 0.09, 1e-9);
  const TextBox diamond{{5, 3, 7, 5, 5, 7, 3, 5}, 1};  // 1 + 3 + 5 + 3 + 1 pixels
  EXPECT_NEAR(covered_share(std::vector{diamond}, 10), 0.13, 1e-9);
  const TextBox beyond{{-50, -50, 500, -50, 500, 500, -50, 500}, 1};
  EXPECT_EQ(covered_share(std::vector{beyond}, 10), 1);
  EXPECT_EQ(covered_share({}, 10), 0);
}

TEST(Regions, CoordinatesOfThePicture) {
  // 1920 x 1080 at 1024: 1820 wide, of which 398 are cut off on the left.
  const TextBox box{{0, 0, 1023, 0, 1023, 1023, 0, 1023}, 1};
  const TextBox moved = in_picture(std::vector{box}, 1080, 1920, 1024).front();
  EXPECT_NEAR(moved.corners[0], 398.5 * 1920 / 1820 - 0.5, 1e-3);
  EXPECT_NEAR(moved.corners[2], 1421.5 * 1920 / 1820 - 0.5, 1e-3);
  EXPECT_NEAR(moved.corners[1], 0.5 * 1080 / 1024 - 0.5, 1e-3);
  EXPECT_NEAR(moved.corners[5], 1023.5 * 1080 / 1024 - 0.5, 1e-3);
  EXPECT_EQ(in_picture(std::vector{box}, 1024, 1024, 1024).front().corners, box.corners);
}

TEST(Regions, DrawnOutlines) {
  std::vector<std::uint8_t> rgb(3 * 32 * 32);
  const TextBox far{{-1e9f, 4, 1e9f, 4, 1e9f, 5, -1e9f, 5}, 1},
      box{{8, 8, 20, 8, 20, 20, 8, 20}, 1};
  draw_boxes(std::vector{far, box}, 32, rgb);
  EXPECT_EQ(rgb[3 * (8 * 32 + 15)], 255);
  EXPECT_EQ(rgb[3 * (14 * 32 + 14)], 0);
}

TEST(ScoreRows, Shards) {
  using ::testing::Pair;
  EXPECT_THAT(shard_of("", 10), Pair(0, 10));
  std::int64_t at = 0;
  for (int k = 1; k <= 3; ++k) {
    const auto [begin, end] = shard_of(std::to_string(k) + "/3", 10);
    EXPECT_EQ(begin, at);
    at = end;
  }
  EXPECT_EQ(at, 10);
  EXPECT_THAT(shard_of("7/8", 2), Pair(1, 1));
  for (const char* bad : {"0/3", "4/3", "1", "1/", "/3", "1/3x", "-1/3", "1/0"})
    EXPECT_THROW(shard_of(bad, 10), Error) << bad;
}

TEST(ScoreFiles, Names) {
  EXPECT_EQ(item_name("a/b.mp4"), "a/b.mp4");
  // Names that cannot stand in a line or a terminal are still told apart.
  EXPECT_NE(item_name("a\nb"), item_name("a\rb"));
  EXPECT_EQ(item_name("a\x1b[2Jb").find('\x1b'), std::string::npos);
  EXPECT_NE(item_name("\xff"), item_name("\xfe"));
  EXPECT_FALSE(item_name("").empty());
}

}  // namespace
}  // namespace weft
