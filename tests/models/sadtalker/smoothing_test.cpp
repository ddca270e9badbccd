// Savitzky-Golay's filter against what is known of it.
#include "models/sadtalker/speech/smoothing.h"

#include <gtest/gtest.h>

#include <vector>

namespace weft {
namespace {

TEST(Smoothing, WindowsOfShortClipsAreOdd) {
  EXPECT_EQ(smoothing_window(1000), 13);
  EXPECT_EQ(smoothing_window(13), 13);
  EXPECT_EQ(smoothing_window(12), 11);
  EXPECT_EQ(smoothing_window(4), 3);
  EXPECT_EQ(smoothing_window(3), 3);
}

TEST(Smoothing, ParabolasStay) {
  for (const int T : {3, 4, 5, 12, 13, 14, 40}) {
    std::vector<float> values;
    for (int t = 0; t < T; ++t) {
      const auto x = static_cast<float>(t);
      values.insert(values.end(), {0.25f * x * x - 3 * x + 1, 2 - 0.5f * x});
    }
    const std::vector<float> before = values;
    smooth_motion(values, 2);
    for (std::size_t i = 0; i < values.size(); ++i) EXPECT_NEAR(values[i], before[i], 2e-4) << T;
  }
}

// The tabulated weights of five points: -3, 12, 17, 12, -3 over 35; and, at the ends, those of the
// parabola through the first five.
TEST(Smoothing, AnImpulseShowsTheWeights) {
  std::vector<float> values = {0, 0, 1, 0, 0, 0};
  smooth_motion(values, 1);
  const double expected[] = {-3.0 / 35, 12.0 / 35, 17.0 / 35, 12.0 / 35};
  EXPECT_NEAR(values[0], -3.0 / 35, 1e-6);
  EXPECT_NEAR(values[1], 12.0 / 35, 1e-6);
  EXPECT_NEAR(values[2], expected[2], 1e-6);
  EXPECT_NEAR(values[3], expected[3], 1e-6);
  std::vector<float> first = {1, 0, 0, 0, 0, 0};
  smooth_motion(first, 1);
  EXPECT_NEAR(first[0], 31.0 / 35, 1e-6);
  EXPECT_NEAR(first[1], 9.0 / 35, 1e-6);
  EXPECT_NEAR(first[2], -3.0 / 35, 1e-6);
  EXPECT_EQ(first[3], 0);
}

TEST(Smoothing, TooFewFramesStayAsTheyAre) {
  for (std::vector<float> values : {std::vector<float>{1, 5}, {1, 5, -7, 2}}) {
    const std::vector<float> before = values;
    smooth_motion(values, 2);
    EXPECT_EQ(values, before);
  }
}

}  // namespace
}  // namespace weft
