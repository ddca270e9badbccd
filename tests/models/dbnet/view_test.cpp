#include "models/dbnet/view.h"

#include <gtest/gtest.h>

namespace weft {
namespace {

TEST(DetectorView, SizesAreThoseOfTheOriginal) {
  // A picture of ICDAR 2015, whose longer side decides: 1333 / 1280.
  const ViewSize icdar = view_size({720, 1280}, 736, 1333);
  EXPECT_EQ(icdar.scaled, (ImageSize{736, 1308}));
  EXPECT_EQ(icdar.padded, (ImageSize{736, 1312}));
  const ViewSize wide = view_size({100, 1000}, 736, 1333);
  EXPECT_EQ(wide.scaled, (ImageSize{133, 1333}));
  EXPECT_EQ(wide.padded, (ImageSize{160, 1344}));
  const ViewSize own = view_size({333, 64}, 0, 32);
  EXPECT_EQ(own.scaled, (ImageSize{333, 64}));
  EXPECT_EQ(own.padded, (ImageSize{352, 64}));
  EXPECT_EQ(view_size({1, 30000}, 736, 1333).scaled, (ImageSize{1, 1333}));
}

TEST(DetectorView, PictureInTheCornerAndMeanColourBeyond) {
  std::vector<std::uint8_t> rgb;
  for (int i = 0; i < 20 * 40; ++i)
    rgb.insert(rgb.end(), {200, static_cast<std::uint8_t>(i % 40), 7});
  const RgbView picture{rgb.data(), 20, 40, 120};
  const auto at = [](const std::vector<std::uint8_t>& view, std::size_t x, std::size_t y) {
    const std::size_t i = 3 * (64 * y + x);
    return std::vector<int>{view[i], view[i + 1], view[i + 2]};
  };
  const std::vector<std::uint8_t> own = detector_view(picture, {{20, 40}, {32, 64}});
  ASSERT_EQ(own.size(), 32u * 64 * 3);
  EXPECT_EQ(at(own, 39, 19), (std::vector<int>{200, 39, 7}));
  EXPECT_EQ(at(own, 40, 19), (std::vector<int>{124, 116, 104}));
  EXPECT_EQ(at(own, 0, 20), (std::vector<int>{124, 116, 104}));
  // Half as wide: pixel x is the mean of 2x and 2x + 1.
  const std::vector<std::uint8_t> half = detector_view(picture, {{10, 20}, {32, 64}});
  EXPECT_EQ(at(half, 4, 9)[0], 200);
  EXPECT_NEAR(at(half, 4, 9)[1], 8.5, 0.51);
  EXPECT_EQ(at(half, 20, 9), (std::vector<int>{124, 116, 104}));
}

}  // namespace
}  // namespace weft
