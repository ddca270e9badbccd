// Text boxes of probability maps, and what the detector sees of a picture.
#include "models/dbnet/boxes.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "models/dbnet/frame.h"

namespace weft {
namespace {

constexpr std::int64_t height = 120, width = 160;

class TextBoxes : public testing::Test {
 protected:
  // Rows [top, bottom) and columns [left, right).
  void fill(std::int64_t top, std::int64_t left, std::int64_t bottom, std::int64_t right,
            float value) {
    for (std::int64_t y = top; y < bottom; ++y)
      for (std::int64_t x = left; x < right; ++x)
        map_[static_cast<std::size_t>(y * width + x)] = value;
  }
  std::vector<TextBox> find() const { return find_text_boxes(map_, height, width, deck_); }

  std::vector<float> map_ = std::vector<float>(height * width, 0.0f);
  PostprocessDeck deck_;
};

TEST_F(TextBoxes, GrowByAreaOverLength) {
  // Between the centres of its outermost pixels 40 x 20, so it grows by 800 * 1.5 / 120 = 10.
  fill(30, 50, 51, 91, 0.75f);
  const auto boxes = find();
  ASSERT_EQ(boxes.size(), 1u);
  EXPECT_FLOAT_EQ(boxes[0].score, 0.75f);
  std::vector<std::pair<float, float>> corners;
  for (std::size_t i = 0; i < 8; i += 2)
    corners.emplace_back(boxes[0].corners[i], boxes[0].corners[i + 1]);
  std::ranges::sort(corners);
  const std::vector<std::pair<float, float>> wanted = {{40, 20}, {40, 60}, {100, 20}, {100, 60}};
  for (std::size_t i = 0; i < 4; ++i) {
    EXPECT_NEAR(corners[i].first, wanted[i].first, 1e-3);
    EXPECT_NEAR(corners[i].second, wanted[i].second, 1e-3);
  }
  deck_.unclip_ratio = 0.3;
  EXPECT_NEAR(*std::ranges::min_element(find().at(0).corners), 30 - 2, 1e-3);
}

TEST_F(TextBoxes, ComeFromTheBottomUp) {
  fill(10, 10, 31, 51, 0.5f);
  fill(60, 90, 81, 131, 0.9f);
  auto boxes = find();
  ASSERT_EQ(boxes.size(), 2u);
  EXPECT_FLOAT_EQ(boxes[0].score, 0.9f);
  EXPECT_FLOAT_EQ(boxes[1].score, 0.5f);
  deck_.max_candidates = 0;
  boxes = find();
  ASSERT_EQ(boxes.size(), 1u);
  EXPECT_FLOAT_EQ(boxes[0].score, 0.9f);
}

TEST_F(TextBoxes, NeedAProbabilityAboveTheThreshold) {
  EXPECT_TRUE(find().empty());
  fill(10, 10, 31, 51, 0.3f);
  EXPECT_TRUE(find().empty());
  fill(10, 10, 31, 51, std::nextafter(0.3f, 1.0f));
  EXPECT_EQ(find().size(), 1u);
  deck_.mask_threshold = 0.5;
  EXPECT_TRUE(find().empty());
  fill(10, 10, 31, 51, std::numeric_limits<float>::quiet_NaN());
  EXPECT_TRUE(find().empty());
}

TEST_F(TextBoxes, WhoseMeanIsTooLowAreLeftOut) {
  // Two outlines, the frame's and its hole's: 13 % and 8 % of their pixels are set.
  fill(10, 10, 110, 110, 0.9f);
  fill(13, 13, 107, 107, 0.0f);
  EXPECT_TRUE(find().empty());
  deck_.min_text_score = 0.1;
  EXPECT_EQ(find().size(), 1u);
}

TEST_F(TextBoxes, LinesAndSpecksAreLeftOut) {
  fill(10, 10, 11, 90, 0.9f);
  fill(40, 10, 41, 11, 0.9f);
  EXPECT_TRUE(find().empty());
  fill(60, 60, 64, 64, 0.9f);
  ASSERT_EQ(find().size(), 1u);
  deck_.min_text_width = 8;
  EXPECT_TRUE(find().empty());
}

TEST_F(TextBoxes, OfTheWholeMapReachBeyondIt) {
  fill(0, 0, height, width, 1.0f);
  const auto boxes = find();
  ASSERT_EQ(boxes.size(), 1u);
  EXPECT_LT(*std::ranges::min_element(boxes[0].corners), -50);
}

TEST_F(TextBoxes, CountAboveTheLeastScoreOnly) {
  std::vector<TextBox> boxes(3);
  boxes[0].score = 0.3f;
  boxes[1].score = std::nextafter(0.3f, 1.0f);
  boxes[2].score = 0.9f;
  EXPECT_EQ(count_text(boxes, deck_), 2);
}

std::vector<std::uint8_t> picture(std::int64_t rows, std::int64_t columns) {
  std::vector<std::uint8_t> rgb;
  for (std::int64_t i = 0; i < rows * columns * 3; ++i)
    rgb.push_back(static_cast<std::uint8_t>(i * 37 + i / columns * 11));
  return rgb;
}

TEST(DetectorFrame, IsTheMiddleOfTheScaledPicture) {
  // The longer side: int(64 * 97 / 41) = 151 -> 43.5 -> 44; int(64 * 95 / 40) = 152 -> 44.
  for (const auto& [rows, columns, longer, from] :
       {std::tuple(41, 97, 151, 44), {40, 95, 152, 44}, {97, 41, 151, 44}, {64, 64, 64, 0}}) {
    const auto rgb = picture(rows, columns);
    const std::int64_t h = rows <= columns ? 64 : longer, w = rows <= columns ? longer : 64;
    std::vector<std::uint8_t> whole(static_cast<std::size_t>(h * w * 3));
    pillow_resize({rgb.data(), rows, columns, columns * 3}, h, w, PillowFilter::bilinear,
                  whole.data(), w * 3);
    const auto frame = detector_frame({rgb.data(), rows, columns, columns * 3}, 64);
    ASSERT_EQ(frame.size(), 64u * 64 * 3);
    const std::int64_t top = rows <= columns ? 0 : from, left = rows <= columns ? from : 0;
    for (std::int64_t y = 0; y < 64; ++y)
      EXPECT_TRUE(std::equal(whole.begin() + ((top + y) * w + left) * 3,
                             whole.begin() + ((top + y) * w + left + 64) * 3,
                             frame.begin() + y * 64 * 3))
          << rows << " " << y;
  }
}

// As a whole, the scaled picture would have 4.7 GB.
TEST(DetectorFrame, TakesNoMemoryForWhatItCutsOff) {
  for (const auto& [rows, columns] : {std::pair(20, 30'000), {30'000, 20}}) {
    std::vector<std::uint8_t> rgb(static_cast<std::size_t>(rows * columns * 3), 90);
    const auto frame = detector_frame({rgb.data(), rows, columns, columns * 3});
    EXPECT_EQ(std::ranges::count(frame, 90), 1024 * 1024 * 3);
  }
}

}  // namespace
}  // namespace weft
