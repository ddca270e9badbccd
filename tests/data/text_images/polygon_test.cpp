// Polygons around text: size, growing and shrinking, and the least rectangle.
#include "data/text_images/polygon.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>

#include "core/error.h"

namespace weft {
namespace {

Polygon square(double side) { return {{0, 0}, {side, 0}, {side, side}, {0, side}}; }

TEST(Polygons, HaveAnAreaAndALength) {
  EXPECT_DOUBLE_EQ(polygon_area(square(7)), 49);
  EXPECT_DOUBLE_EQ(polygon_length(square(7)), 28);
  // The other way round, and a triangle.
  const Polygon triangle = {{0, 0}, {0, 4}, {3, 0}};
  EXPECT_DOUBLE_EQ(polygon_area(triangle), 6);
  EXPECT_DOUBLE_EQ(polygon_length(triangle), 12);
  EXPECT_DOUBLE_EQ(polygon_area(Polygon{{1, 1}, {5, 5}}), 0);
}

TEST(Polygons, GrowWithRoundCorners) {
  const auto grown = offset_polygon(square(100), 10);
  ASSERT_EQ(grown.size(), 1u);
  EXPECT_NEAR(polygon_area(grown[0]), 100 * 100 + 4 * 100 * 10 + std::numbers::pi * 100, 20);
  for (const Point& p : grown[0]) {
    EXPECT_EQ(p.x, std::round(p.x));
    // Of the corner that it belongs to, a point is 10 pixels away.
    const double x = std::clamp(p.x, 0.0, 100.0), y = std::clamp(p.y, 0.0, 100.0);
    EXPECT_NEAR(std::hypot(p.x - x, p.y - y), 10, 0.75);
  }
}

TEST(Polygons, ShrinkFallApartAndVanish) {
  auto shrunk = offset_polygon(square(100), -10);
  ASSERT_EQ(shrunk.size(), 1u);
  EXPECT_EQ(polygon_area(shrunk[0]), 80 * 80);
  EXPECT_TRUE(offset_polygon(square(100), -51).empty());
  // Two squares with a bridge of 10 pixels between them.
  const Polygon two = {{0, 0},     {100, 0},   {100, 45}, {200, 45}, {200, 0},   {300, 0},
                       {300, 100}, {200, 100}, {200, 55}, {100, 55}, {100, 100}, {0, 100}};
  EXPECT_EQ(offset_polygon(two, -4).size(), 1u);
  shrunk = offset_polygon(two, -6);
  ASSERT_EQ(shrunk.size(), 2u);
  EXPECT_NEAR(polygon_area(shrunk[0]), 88 * 88, 20);
}

TEST(Polygons, LinesDoNotGrow) {
  EXPECT_TRUE(offset_polygon(Polygon{{0, 0}, {9, 0}, {5, 0}, {2, 0}}, 0).empty());
}

TEST(Polygons, PointsAreCutToWholePixels) {
  const auto same = offset_polygon(Polygon{{-0.9, 0.9}, {10.9, 0}, {10, 10.99}, {0, 10}}, 0);
  ASSERT_EQ(same.size(), 1u);
  EXPECT_EQ(polygon_area(same[0]), 100);
}

TEST(Polygons, PointsThatAreNoneAreRefused) {
  for (const double bad : {std::numeric_limits<double>::quiet_NaN(), 1e300, -1e300}) {
    EXPECT_THROW(offset_polygon(Polygon{{0, 0}, {bad, 0}, {1, 1}}, 1), Error);
    EXPECT_THROW(offset_polygon(square(3), bad), Error);
  }
}

TEST(Polygons, HaveARectangleOfLeastArea) {
  // 40 x 20, turned by 30 degrees, with points on its sides.
  const double c = std::cos(std::numbers::pi / 6), s = std::sin(std::numbers::pi / 6);
  Polygon points;
  for (const auto& [x, y] : {std::pair(0, 0), {40, 0}, {40, 20}, {0, 20}, {20, 0}, {13, 9}})
    points.push_back({50 + c * x - s * y, 60 + s * x + c * y});
  const AreaRect rect = min_area_rect(points);
  EXPECT_NEAR(rect.shorter_side, 20, 1e-3);
  for (const auto& corner : rect.corners) {
    double nearest = 1e9;
    for (std::size_t i = 0; i < 4; ++i)
      nearest = std::min(nearest, std::hypot(corner[0] - points[i].x, corner[1] - points[i].y));
    EXPECT_LT(nearest, 1e-3);
  }
}

}  // namespace
}  // namespace weft
