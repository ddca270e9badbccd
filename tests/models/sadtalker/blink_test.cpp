// Blinks that the seed draws.
#include "models/sadtalker/speech/blink.h"

#include <gtest/gtest.h>

#include <set>

namespace weft {
namespace {

TEST(Blink, ShortClipsHaveNone) {
  for (const int T : {1, 2, 20, 21})
    EXPECT_EQ(random_blinks(T, 3), std::vector<float>(static_cast<std::size_t>(T), 0.0f)) << T;
}

TEST(Blink, TwentyTwoFramesLeaveOneChoice) {
  std::vector<float> expected(22, 0.0f);
  const float closed[] = {0.5f, 0.9f, 1.0f, 0.9f, 0.5f};
  std::copy(std::begin(closed), std::end(closed), expected.begin() + 10);
  for (const std::uint64_t seed : {0, 1, 99}) EXPECT_EQ(random_blinks(22, seed), expected);
}

TEST(Blink, AreFiveFramesLongAndTenOrMoreApart) {
  std::set<std::int64_t> pauses;
  for (std::uint64_t seed = 0; seed < 50; ++seed) {
    constexpr std::int64_t T = 300;
    const std::vector<float> eyes = random_blinks(T, seed);
    ASSERT_EQ(std::ssize(eyes), T);
    std::int64_t open = 0, blinks = 0;
    for (std::size_t t = 0; t < eyes.size();) {
      if (eyes[t] == 0) {
        ++open;
        ++t;
        continue;
      }
      EXPECT_GE(open, 10);
      EXPECT_LT(open, 70);
      pauses.insert(open);
      ASSERT_LT(t + 5, eyes.size());  // the last frame is never part of one
      for (const float closed : {0.5f, 0.9f, 1.0f, 0.9f, 0.5f}) EXPECT_EQ(eyes[t++], closed);
      open = 0;
      ++blinks;
    }
    EXPECT_GE(blinks, 1);
  }
  EXPECT_GT(pauses.size(), 30u);
}

TEST(Blink, SeedsDecide) {
  EXPECT_EQ(random_blinks(500, 7), random_blinks(500, 7));
  EXPECT_NE(random_blinks(500, 7), random_blinks(500, 8));
}

}  // namespace
}  // namespace weft
