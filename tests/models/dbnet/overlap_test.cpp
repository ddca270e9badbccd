#include "models/dbnet/overlap.h"

#include <gtest/gtest.h>

#include <random>

#include "core/error.h"

namespace weft {
namespace {

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

}  // namespace
}  // namespace weft
