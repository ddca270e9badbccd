#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "models/sadtalker/gfpgan/paste.h"
#include "tensor/tensor.h"

namespace weft::test {
namespace {

// The template, turned and scaled about its corner, then shifted: points in a frame.
FacePoints face_in_frame(double turn, double scale, double x, double y) {
  FacePoints points;
  for (std::size_t i = 0; i < 5; ++i) {
    const auto& [u, v] = face_template()[i];
    points[i] = {static_cast<float>(scale * (std::cos(turn) * u - std::sin(turn) * v) + x),
                 static_cast<float>(scale * (std::sin(turn) * u + std::cos(turn) * v) + y)};
  }
  return points;
}

double distance(const AffineMap& map, const std::array<float, 2>& from,
                const std::array<float, 2>& to) {
  const auto [x, y] = map(from[0], from[1]);
  return std::hypot(x - to[0], y - to[1]);
}

TEST(FaceTransform, UndoesASimilarityEvenIfALandmarkIsWrong) {
  for (const auto& [turn, scale] : {std::pair{0.0, 1.0}, {0.6, 0.35}, {-1.9, 3.0}}) {
    const FacePoints right = face_in_frame(turn, scale, 310.25, -42.5);
    for (std::size_t wrong = 0; wrong <= 5; ++wrong) {  // 5: none
      FacePoints seen = right;
      if (wrong < 5) seen[wrong][0] += 90, seen[wrong][1] -= 55;
      const auto map = face_transform(seen);
      ASSERT_TRUE(map.has_value());
      for (std::size_t i = 0; i < 5; ++i)
        EXPECT_LT(distance(*map, right[i], face_template()[i]), 1e-3) << turn << " wrong " << wrong;
      // No shear, no mirror.
      EXPECT_DOUBLE_EQ(map->m[0], map->m[4]);
      EXPECT_DOUBLE_EQ(map->m[1], -map->m[3]);
      EXPECT_NEAR(std::hypot(map->m[0], map->m[3]), 1 / scale, 1e-5);
    }
  }
}

TEST(FaceTransform, IsThatOfOpenCV) {
  // cv2.estimateAffinePartial2D(points, template, method=cv2.LMEDS) of OpenCV 4.11, all points in
  // use for the first, the nose left out for the second.
  const FacePoints close{
      {{100.5f, 120.25f}, {161, 118.5f}, {131.75f, 160}, {108, 190.5f}, {158.25f, 187}}};
  FacePoints far = close;
  far[2] = {180, 150};
  const std::pair<FacePoints, std::array<double, 6>> wanted[] = {
      {close,
       {1.98366209487, -0.0668543392071, 5.30781190361, 0.0668543392071, 1.98366209487,
        -9.43729773554}},
      {far,
       {1.98573053744, -0.0672960532809, 4.93406917536, 0.0672960532809, 1.98573053744,
        -9.12990869746}}};
  for (const auto& [points, m] : wanted) {
    const auto map = face_transform(points);
    ASSERT_TRUE(map.has_value());
    for (std::size_t i = 0; i < 6; ++i) EXPECT_NEAR(map->m[i], m[i], i % 3 == 2 ? 1e-4 : 1e-6) << i;
  }
}

TEST(FaceTransform, NeedsPlacesThatDiffer) {
  FacePoints same;
  same.fill({30, 40});
  EXPECT_FALSE(face_transform(same).has_value());
  FacePoints damaged = face_template();
  damaged[3][1] = std::numeric_limits<float>::quiet_NaN();
  EXPECT_FALSE(face_transform(damaged).has_value());
  damaged[3][1] = std::numeric_limits<float>::infinity();
  EXPECT_FALSE(face_transform(damaged).has_value());
}

TEST(FaceTransform, WayBack) {
  const AffineMap map = *face_transform(face_in_frame(0.3, 0.5, 100, 20));
  const AffineMap back = back_transform(map, 1), larger = back_transform(map, 2);
  for (const auto& [x, y] : {std::pair{0.0, 0.0}, {511.0, 30.0}, {250.0, 400.0}}) {
    const auto [u, v] = back(x, y);
    const auto [s, t] = map(u, v);
    EXPECT_NEAR(s, x, 1e-9);
    EXPECT_NEAR(t, y, 1e-9);
    // Twice as far, and a pixel of the larger frame on.
    EXPECT_NEAR(larger(x, y)[0], 2 * u + 1, 1e-9);
    EXPECT_NEAR(larger(x, y)[1], 2 * v + 1, 1e-9);
  }
}

TEST(WarpFace, CopiesPixelsAndIsGreyBeyondTheFrame) {
  ImageFile frame{40, 60, {}};
  for (int i = 0; i < 40 * 60; ++i)
    frame.values.insert(frame.values.end(),
                        {static_cast<std::uint8_t>(i % 60), static_cast<std::uint8_t>(i / 60), 9});
  AffineMap shift;
  shift.m[2] = 100, shift.m[5] = 200;
  const std::vector<std::uint8_t> face = warp_face(frame, shift);
  const auto at = [&](std::size_t x, std::size_t y) {
    const std::size_t i = 3 * (face_side * y + x);
    return std::array<int, 3>{face[i], face[i + 1], face[i + 2]};
  };
  EXPECT_EQ(at(100, 200), (std::array<int, 3>{0, 0, 9}));
  EXPECT_EQ(at(159, 239), (std::array<int, 3>{59, 39, 9}));
  EXPECT_EQ(at(160, 239), (std::array<int, 3>{132, 133, 135}));
  EXPECT_EQ(at(0, 0), (std::array<int, 3>{132, 133, 135}));
  shift.m[2] += 0.5;
  const std::vector<std::uint8_t> between = warp_face(frame, shift);
  EXPECT_NEAR(between[3 * (face_side * 210 + 131)], 30.5, 0.51);
}

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
}  // namespace weft::test
