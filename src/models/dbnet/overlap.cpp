#include "models/dbnet/overlap.h"

#include <algorithm>
#include <cmath>
#include <polyclipping/clipper.hpp>

#include "core/error.h"

namespace weft {
namespace {

constexpr double grid = 256;  // of a pixel: errors are far below those of a whole pixel's rounding
constexpr double farthest = 1e6;

struct Extent {
  double left = 0, top = 0, right = 0, bottom = 0;
};
Extent extent_of(std::span<const Point> polygon) {
  Extent e{polygon[0].x, polygon[0].y, polygon[0].x, polygon[0].y};
  for (const Point& p : polygon) {
    WEFT_CHECK(std::abs(p.x) <= farthest && std::abs(p.y) <= farthest, Exit::data,
               "give the polygon in pixels of its picture", "a polygon has a corner at {}, {}", p.x,
               p.y);
    e.left = std::min(e.left, p.x), e.right = std::max(e.right, p.x);
    e.top = std::min(e.top, p.y), e.bottom = std::max(e.bottom, p.y);
  }
  return e;
}

ClipperLib::Path on_grid(std::span<const Point> polygon) {
  ClipperLib::Path path;
  for (const Point& p : polygon)
    path.push_back({std::llround(p.x * grid), std::llround(p.y * grid)});
  return path;
}

}  // namespace

double common_area(std::span<const Point> a, std::span<const Point> b) {
  if (a.size() < 3 || b.size() < 3) return 0;
  const Extent i = extent_of(a), j = extent_of(b);
  if (i.right <= j.left || j.right <= i.left || i.bottom <= j.top || j.bottom <= i.top) return 0;
  ClipperLib::Clipper clipper;
  ClipperLib::Paths common;
  clipper.AddPath(on_grid(a), ClipperLib::ptSubject, true);
  clipper.AddPath(on_grid(b), ClipperLib::ptClip, true);
  clipper.Execute(ClipperLib::ctIntersection, common, ClipperLib::pftNonZero,
                  ClipperLib::pftNonZero);
  double area = 0;  // holes have the other sign
  for (const ClipperLib::Path& path : common) area += ClipperLib::Area(path);
  return std::abs(area) / (grid * grid);
}

}  // namespace weft
