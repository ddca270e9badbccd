#include "jobs/evaluate/outlines.h"

#include <algorithm>
#include <cmath>

namespace weft {
namespace {

// Cuts the line from a to b to 0 <= x <= right, 0 <= y <= bottom (Liang and Barsky). False: it does
// not meet that.
bool cut(Point& a, Point& b, double right, double bottom) {
  const double dx = b.x - a.x, dy = b.y - a.y;
  double first = 0, last = 1;
  const auto keep = [&](double slope, double distance) {
    if (slope == 0) return distance >= 0;
    const double at = distance / slope;
    if (slope < 0)
      first = std::max(first, at);
    else
      last = std::min(last, at);
    return first <= last;
  };
  if (!keep(-dx, a.x) || !keep(dx, right - a.x) || !keep(-dy, a.y) || !keep(dy, bottom - a.y))
    return false;
  const Point from = a;
  a = {from.x + first * dx, from.y + first * dy};
  b = {from.x + last * dx, from.y + last * dy};
  return true;
}

}  // namespace

void draw_outline(std::vector<std::uint8_t>& rgb, ImageSize size, std::span<const Point> polygon,
                  Rgb colour, std::int64_t thickness) {
  const auto dot = [&](double at_x, double at_y) {
    const std::int64_t left = std::llround(at_x) - thickness / 2;
    const std::int64_t top = std::llround(at_y) - thickness / 2;
    for (std::int64_t y = std::max<std::int64_t>(top, 0);
         y < std::min(top + thickness, size.height); ++y)
      for (std::int64_t x = std::max<std::int64_t>(left, 0);
           x < std::min(left + thickness, size.width); ++x) {
        std::uint8_t* pixel = rgb.data() + 3 * (y * size.width + x);
        pixel[0] = colour.r, pixel[1] = colour.g, pixel[2] = colour.b;
      }
  };
  for (std::size_t i = 0; i < polygon.size(); ++i) {
    Point a = polygon[i], b = polygon[(i + 1) % polygon.size()];
    const bool finite =
        std::isfinite(a.x) && std::isfinite(a.y) && std::isfinite(b.x) && std::isfinite(b.y);
    if (!finite || !cut(a, b, static_cast<double>(size.width), static_cast<double>(size.height)))
      continue;
    const double steps =
        std::max(1.0, std::ceil(std::max(std::abs(b.x - a.x), std::abs(b.y - a.y))));
    for (double s = 0; s <= steps; ++s)
      dot(a.x + s / steps * (b.x - a.x), a.y + s / steps * (b.y - a.y));
  }
}

}  // namespace weft
