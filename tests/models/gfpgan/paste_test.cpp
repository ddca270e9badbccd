#include "models/gfpgan/paste.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "tensor/tensor.h"

namespace weft {
namespace {

constexpr std::size_t pixels = std::size_t{face_side} * face_side;

std::vector<double> mask_of(const std::vector<std::uint8_t>& classes) {
  const auto arena = Arena::reserve(std::size_t{16} << 20);
  const ArenaScope scope(*arena);
  std::vector<double> mask = face_mask(classes);
  EXPECT_LE(arena->peak(), std::size_t{4} << 20);
  return mask;
}

std::size_t at(std::size_t x, std::size_t y) { return face_side * y + x; }

// The Gaussian's share below `x` pixels.
double below(double x, double deviation) { return 0.5 * std::erfc(-x / deviation / std::sqrt(2)); }

TEST(FaceMask, ShowsWhatBelongsToTheFace) {
  for (const auto& [c, shown] : {std::pair{0, false},
                                 {1, true},
                                 {13, true},
                                 {14, false},
                                 {15, true},
                                 {16, false},
                                 {17, false},
                                 {18, false}}) {
    const std::vector<double> mask = mask_of(std::vector<std::uint8_t>(pixels, c));
    for (const auto& [x, y] : {std::pair{10, 10}, {256, 256}, {501, 13}})
      EXPECT_EQ(mask[at(x, y)], shown ? 1.0 : 0.0) << c;
    // The border is never shown.
    for (const auto& [x, y] : {std::pair{9, 100}, {100, 9}, {502, 100}, {100, 502}, {0, 511}})
      EXPECT_EQ(mask[at(x, y)], 0.0) << c;
  }
}

TEST(FaceMask, EdgesAreSoft) {
  std::vector<std::uint8_t> classes(pixels);
  for (std::size_t i = 0; i < pixels; ++i) classes[i] = i % face_side < 300 ? 1 : 0;
  const std::vector<double> mask = mask_of(classes);
  // Two Gaussians of deviation 11 are one of 11 sqrt(2), but for their cut tails.
  for (const std::size_t x : {250, 285, 299, 300, 320, 345})
    EXPECT_NEAR(mask[at(x, 200)], below(299.5 - static_cast<double>(x), 11 * std::sqrt(2)), 1e-3)
        << x;
  EXPECT_EQ(mask[at(150, 200)], 1.0);
  EXPECT_EQ(mask[at(450, 200)], 0.0);
  // The other axis alike.
  std::vector<std::uint8_t> turned(pixels);
  for (std::size_t i = 0; i < pixels; ++i) turned[i] = i / face_side < 300 ? 1 : 0;
  const std::vector<double> other = mask_of(turned);
  for (const std::size_t x : {285, 300, 320})
    EXPECT_NEAR(other[at(77, x)], mask[at(x, 77)], 1e-6) << x;
}

ImageFile striped(std::int64_t height, std::int64_t width) {
  ImageFile frame{height, width, {}};
  for (std::int64_t i = 0; i < height * width * 3; ++i)
    frame.values.push_back(static_cast<std::uint8_t>(i * 7 + i / 100));
  return frame;
}

TEST(Paste, LeavesWhatItDoesNotTouch) {
  const ImageFile before = striped(120, 150);
  const std::vector<std::uint8_t> face(pixels * 3, 200);
  const std::vector<double> mask = mask_of(std::vector<std::uint8_t>(pixels, 1));
  // The face's square as 51 x 51 pixels from (40, 30) on.
  const AffineMap back{{0.1, 0, 40, 0, 0.1, 30}};
  const auto patch = make_patch(face, mask, back, before.height, before.width);
  ASSERT_TRUE(patch.has_value());
  ImageFile after = before;
  paste(std::vector{*patch}, after);
  std::int64_t shown = 0;
  for (std::int64_t y = 0; y < before.height; ++y)
    for (std::int64_t x = 0; x < before.width; ++x)
      for (std::int64_t c = 0; c < 3; ++c) {
        const auto i = static_cast<std::size_t>((y * before.width + x) * 3 + c);
        const bool inside = x > 41 && x < 90 && y > 31 && y < 80,
                   outside = x < 40 || x > 91 || y < 30 || y > 81;
        // In between the face fades.
        const int wanted = inside ? 200 : before.values[i];
        if (inside || outside) {
          EXPECT_EQ(after.values[i], wanted) << x << " " << y;
        }
        shown += inside;
      }
  EXPECT_EQ(shown, 48 * 48 * 3);
}

TEST(Paste, LaterFacesLieOverEarlierOnesAndLevelsAreCut) {
  ImageFile frame{1, 3, std::vector<std::uint8_t>(9, 100)};
  const FacePatch first{0, 0, 2, 1, std::vector<std::uint8_t>(6, 201), {0.5, 1}},
      second{1, 0, 1, 1, std::vector<std::uint8_t>(3, 10), {0.25}};
  paste(std::vector{first, second}, frame);
  EXPECT_EQ(frame.values, (std::vector<std::uint8_t>{150, 150, 150, 153, 153, 153, 100, 100, 100}));
}

TEST(Paste, FacesAtTheEdgeAreCutAndOnesOutsideLeftOut) {
  const std::vector<std::uint8_t> face(pixels * 3, 200);
  const std::vector<double> mask(pixels, 1.0);
  const auto patch = make_patch(face, mask, {{0.5, 0, -100, 0, 0.5, 90}}, 100, 80);
  ASSERT_TRUE(patch.has_value());
  EXPECT_EQ(patch->x, 0);
  EXPECT_EQ(patch->x + patch->width, 80);
  EXPECT_EQ(patch->y + patch->height, 100);
  EXPECT_EQ(std::ssize(patch->alpha), std::int64_t{patch->width} * patch->height);
  for (const double away : {-400.0, 300.0, std::nan("")})
    EXPECT_FALSE(make_patch(face, mask, {{0.5, 0, away, 0, 0.5, 0}}, 100, 80).has_value()) << away;
}

TEST(Paste, DoubledFramesKeepTheirLook) {
  // Constant areas stay what they are; an edge lies between the same pixels.
  ImageFile frame{12, 16, {}};
  for (int i = 0; i < 12 * 16 * 3; ++i) frame.values.push_back(i / 3 % 16 < 8 ? 40 : 200);
  const ImageFile large = doubled_frame(frame);
  ASSERT_EQ(large.height, 24);
  ASSERT_EQ(large.width, 32);
  EXPECT_EQ(large.values[3 * (32 * 10 + 1)], 40);
  EXPECT_EQ(large.values[3 * (32 * 10 + 30)], 200);
  EXPECT_LT(large.values[3 * (32 * 10 + 15)], 120);
  EXPECT_GT(large.values[3 * (32 * 10 + 16)], 120);
}

}  // namespace
}  // namespace weft
