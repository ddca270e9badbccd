// Reference images as Pillow resizes them.
#include <gtest/gtest.h>

#include "media/resize.h"

namespace weft {
namespace {

std::vector<std::uint8_t> pattern(std::int64_t height, std::int64_t width) {
  std::vector<std::uint8_t> rgb;
  for (std::int64_t y = 0; y < height; ++y)
    for (std::int64_t x = 0; x < width; ++x)
      for (std::int64_t c = 0; c < 3; ++c)
        rgb.push_back(static_cast<std::uint8_t>(x * 37 + y * 91 + c * 53 + x * y * 7));
  return rgb;
}

// Of the same pictures through Image.resize(..., BICUBIC) of Pillow and the crop of
// resize_crop_to_fill.
TEST(Bicubic, MakesThePixelsOfPillow) {
  const struct {
    std::int64_t from_height, from_width, height, width, sum, weighted;
    std::vector<std::uint8_t> first_row;
  } cases[] = {
      {9, 14, 4, 4, 6186, 150336, {122, 131, 149, 127, 132, 132}},
      {5, 4, 7, 10, 27688, 2896369, {40, 89, 160, 44, 98, 167}},
      {6, 6, 6, 6, 14033, 762416, {0, 53, 106, 37, 90, 143}},
      {40, 31, 13, 29, 143822, 82452436, {153, 195, 25, 50, 106, 127}},
  };
  for (const auto& c : cases) {
    const auto rgb = pattern(c.from_height, c.from_width);
    VideoFrame frame;
    frame.rgb = rgb.data();
    frame.stride = c.from_width * 3;
    frame.height = c.from_height;
    frame.width = c.from_width;
    const auto out = cover_bicubic(frame, c.height, c.width);
    ASSERT_EQ(out.size(), static_cast<std::size_t>(c.height * c.width * 3));
    std::int64_t sum = 0, weighted = 0;
    for (std::size_t i = 0; i < out.size(); ++i) {
      sum += out[i];
      weighted += static_cast<std::int64_t>(i + 1) * out[i];
    }
    EXPECT_EQ(sum, c.sum) << c.height;
    EXPECT_EQ(weighted, c.weighted) << c.height;
    EXPECT_EQ(std::vector<std::uint8_t>(out.begin(), out.begin() + 6), c.first_row) << c.height;
  }
}

}  // namespace
}  // namespace weft
