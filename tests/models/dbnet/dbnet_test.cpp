// Text boxes of probability maps, and what the detector sees of a picture.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>

#include "core/error.h"
#include "models/dbnet/boxes.h"
#include "models/dbnet/detector.h"
#include "tests/ops/reference.h"

namespace weft::test {
namespace {

constexpr std::int64_t height = 120, width = 160;

class TextBoxes : public testing::Test {
 protected:
  // Rows [top, bottom) and columns [left, right).
  void fill(std::int64_t top, std::int64_t left, std::int64_t bottom, std::int64_t right,
            float value) {
    for (std::int64_t y = top; y < bottom; ++y)
      for (std::int64_t x = left; x < right; ++x) map_[y * width + x] = value;
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

// A head that is only run goes a few rows at a time, where the map has more than those.
TEST(DbnetHead, OnlyRunGivesTheSameMap) {
  const auto arena = Arena::reserve(std::size_t{1} << 30);
  const ArenaScope scope(*arena);
  DbnetDeck deck;
  deck.backbone = "resnet18";
  deck.asf = false;
  Dbnet net(deck, false);
  net.params().allocate_for_inference(false);
  std::uint64_t seed = 0;
  for (const auto& p : net.params().all()) {
    const double scale = 1 / std::sqrt(static_cast<double>(p->shape.numel() / p->shape[0]));
    std::vector<float> v;
    for (const double r : random_values(p->shape.numel(), ++seed, scale))
      v.push_back(static_cast<float>(p->name.ends_with("running_var") ? 0.5 + r * r : r));
    p->set(0, v);
  }
  const Shape shape{1, 1, 64, 1088, 3};
  const Tensor image = to_tensor(random_values(shape.numel(), 1), shape, DType::f32);
  nn::BatchNormGroup group;
  group.use_running = true;
  std::vector<float> maps[2];
  for (const bool runs : {false, true}) {
    Tape tape(runs ? Tape::Mode::infer : Tape::Mode::discard);
    const Tensor map =
        net.forward({tape, net.params()}, make_var(image, false), group, false).probability->value;
    EXPECT_EQ(map.shape(), (Shape{1, 1, 64, 1088, 1}));
    maps[runs].assign(map.span<float>().begin(), map.span<float>().end());
  }
  double most = 0, difference = 0;
  for (std::size_t i = 0; i < maps[0].size(); ++i) {
    most = std::max<double>(most, std::abs(maps[0][i]));
    difference = std::max<double>(difference, std::abs(maps[0][i] - maps[1][i]));
  }
  EXPECT_GT(most, 0.1);
  EXPECT_LT(difference, 1e-5 * most);
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
    std::vector<std::uint8_t> whole(h * w * 3);
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
    std::vector<std::uint8_t> rgb(rows * columns * 3, 90);
    const auto frame = detector_frame({rgb.data(), rows, columns, columns * 3});
    EXPECT_EQ(std::ranges::count(frame, 90), 1024 * 1024 * 3);
  }
}

// Winding number of the polygon around a point.
int winding(const Polygon& p, Point at) {
  int n = 0;
  for (std::size_t i = 0; i < p.size(); ++i) {
    const Point a = p[i], b = p[(i + 1) % p.size()];
    const double side = (b.x - a.x) * (at.y - a.y) - (b.y - a.y) * (at.x - a.x);
    if (a.y <= at.y && b.y > at.y && side > 0) ++n;
    if (a.y > at.y && b.y <= at.y && side < 0) --n;
  }
  return n;
}

// By counting points of a fine grid.
double counted(const Polygon& a, const Polygon& b, double side, int points) {
  const double step = side / points;
  int inside = 0;
  for (int y = 0; y < points; ++y)
    for (int x = 0; x < points; ++x) {
      const Point at{(x + 0.5) * step, (y + 0.5) * step};
      inside += winding(a, at) != 0 && winding(b, at) != 0;
    }
  return inside * step * step;
}

TEST(Overlap, Rectangles) {
  const Polygon a = {{0, 0}, {10, 0}, {10, 4}, {0, 4}}, b = {{5, 2}, {25, 2}, {25, 30}, {5, 30}};
  EXPECT_DOUBLE_EQ(common_area(a, b), 10);
  EXPECT_DOUBLE_EQ(common_area(b, a), 10);
  EXPECT_DOUBLE_EQ(common_area(a, a), 40);
  const Polygon reversed(a.rbegin(), a.rend());
  EXPECT_DOUBLE_EQ(common_area(reversed, b), 10);
  EXPECT_EQ(common_area(a, {{{10, 0}, {20, 0}, {20, 4}}}), 0);  // an edge in common
  EXPECT_EQ(common_area(a, {{{1, 1}, {3, 3}}}), 0);             // no area
}

// Also polygons that are not convex, and those that cross themselves.
TEST(Overlap, AnyShapes) {
  std::mt19937 random(7);
  std::uniform_real_distribution<double> at(0, 40);
  double total = 0;
  for (int i = 0; i < 40; ++i) {
    Polygon a, b;
    for (int k = 0; k < 3 + i % 5; ++k) a.push_back({at(random), at(random)});
    for (int k = 0; k < 3 + i % 4; ++k) b.push_back({at(random), at(random)});
    const double area = common_area(a, b);
    total += area;
    EXPECT_NEAR(area, counted(a, b, 40, 400), 0.02 * 40 + 0.01 * area) << i;
  }
  EXPECT_GT(total, 1000);
}

TEST(Overlap, RefusesWhatIsNowhere) {
  const Polygon a = {{0, 0}, {10, 0}, {10, 4}};
  const Polygon far = {{0, 0}, {1e12, 0}, {10, 4}}, nowhere = {{0, 0}, {0 / 0.0, 0}, {10, 4}};
  EXPECT_THROW(common_area(a, far), Error);
  EXPECT_THROW(common_area(nowhere, a), Error);
}

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
}  // namespace weft::test
