#include "models/gfpgan/warp.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <utility>

namespace weft {
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

}  // namespace
}  // namespace weft
