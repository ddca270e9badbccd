#include "jobs/score/regions.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "data/text_images/polygon.h"

namespace weft {
namespace {

std::array<Point, 4> corners_of(const TextBox& box) {
  std::array<Point, 4> p;
  for (std::size_t i = 0; i < 4; ++i) p[i] = {box.corners[2 * i], box.corners[2 * i + 1]};
  return p;
}

// Of Python's int(side * length / shorter), and its round, as models/dbnet/frame.cpp.
std::int64_t scaled(std::int64_t length, std::int64_t shorter, std::int64_t side) {
  return static_cast<std::int64_t>(static_cast<double>(side * length) /
                                   static_cast<double>(shorter));
}
double middle(std::int64_t length, std::int64_t side) {
  return std::nearbyint(static_cast<double>(length - side) / 2);
}

}  // namespace

double covered_share(std::span<const TextBox> boxes, std::int64_t side) {
  std::vector<bool> covered(static_cast<std::size_t>(side * side), false);
  const auto within = [side](double v) {
    return static_cast<std::int64_t>(std::clamp(v, -1.0, static_cast<double>(side)));
  };
  for (const TextBox& box : boxes) {
    const std::array<Point, 4> p = corners_of(box);
    const auto [low, high] = std::ranges::minmax(p, {}, &Point::y);
    for (std::int64_t y = std::max<std::int64_t>(0, within(std::ceil(low.y)));
         y <= std::min(side - 1, within(std::floor(high.y))); ++y) {
      // A convex outline crosses a row between two points at most.
      double from = 1e30, to = -1e30;
      const auto row = static_cast<double>(y);
      for (std::size_t i = 0; i < 4; ++i) {
        const Point a = p[i], b = p[(i + 1) % 4];
        if (std::min(a.y, b.y) > row || std::max(a.y, b.y) < row) continue;
        const double t = a.y == b.y ? 0 : (row - a.y) / (b.y - a.y);
        for (const double x : {a.x + t * (b.x - a.x), a.y == b.y ? b.x : a.x + t * (b.x - a.x)})
          from = std::min(from, x), to = std::max(to, x);
      }
      for (std::int64_t x = std::max<std::int64_t>(0, within(std::ceil(from)));
           x <= std::min(side - 1, within(std::floor(to))); ++x)
        covered[static_cast<std::size_t>(y * side + x)] = true;
    }
  }
  return static_cast<double>(std::ranges::count(covered, true)) / static_cast<double>(side * side);
}

std::vector<TextBox> in_picture(std::span<const TextBox> boxes, std::int64_t height,
                                std::int64_t width, std::int64_t side) {
  const std::int64_t shorter = std::min(height, width);
  const std::int64_t h = scaled(height, shorter, side), w = scaled(width, shorter, side);
  std::vector<TextBox> moved(boxes.begin(), boxes.end());
  for (TextBox& box : moved)
    for (std::size_t i = 0; i < 8; ++i) {
      const bool is_x = i % 2 == 0;
      const std::int64_t whole = is_x ? w : h, of_picture = is_x ? width : height;
      // Coordinates are those of pixel centres, half a pixel from the edge at any scale.
      const double at = box.corners[i] + middle(whole, side) + 0.5;
      box.corners[i] = static_cast<float>(
          at * static_cast<double>(of_picture) / static_cast<double>(whole) - 0.5);
    }
  return moved;
}

void draw_boxes(std::span<const TextBox> boxes, std::int64_t side, std::vector<std::uint8_t>& rgb) {
  for (const TextBox& box : boxes)
    draw_outline(rgb, {side, side}, corners_of(box), {255, 40, 40}, 3);
}

}  // namespace weft
