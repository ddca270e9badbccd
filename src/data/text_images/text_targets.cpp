#include "data/text_images/text_targets.h"

#include <algorithm>
#include <cmath>
#include <opencv2/imgproc.hpp>

#include "data/text_images/opencv.h"
#include "data/text_images/text_source.h"

namespace weft {
namespace {

constexpr double shrinking = 1 - 0.4 * 0.4, least_side = 8;

Polygon in_whole_pixels(const Polygon& polygon) {
  Polygon out;
  for (const Point& p : polygon) out.push_back({std::trunc(p.x), std::trunc(p.y)});
  return out;
}

std::vector<cv::Point> pixels(const Polygon& polygon) {
  std::vector<cv::Point> out;
  for (const Point& p : polygon) out.emplace_back(static_cast<int>(p.x), static_cast<int>(p.y));
  return out;
}

// The polygon's rows and columns that lie in the picture.
cv::Rect box_of(const std::vector<cv::Point>& polygon, cv::Size size) {
  return cv::boundingRect(polygon) & cv::Rect({0, 0}, size);
}

// Sets or clears a bit of the pixels within a polygon.
void mark(cv::Mat& flags, const std::vector<cv::Point>& polygon, std::uint8_t bit, bool on) {
  const cv::Rect box = box_of(polygon, flags.size());
  if (box.empty()) return;
  cv::Mat inside = cv::Mat::zeros(box.size(), CV_8U);
  cv::fillPoly(inside, std::vector{polygon}, 1, cv::LINE_8, 0, -box.tl());
  for (int y = 0; y < box.height; ++y) {
    const std::uint8_t* in = inside.ptr<std::uint8_t>(y);
    std::uint8_t* f = flags.ptr<std::uint8_t>(box.y + y, box.x);
    for (int x = 0; x < box.width; ++x)
      if (in[x] != 0) f[x] = static_cast<std::uint8_t>(on ? f[x] | bit : f[x] & ~bit);
  }
}

struct Edge {
  float x, y, dx, dy, inverse;  // its start, its way, 1 / length^2; 0 for a point

  float squared_distance(float px, float py) const {
    const float u = px - x, v = py - y;
    const float t = std::clamp((u * dx + v * dy) * inverse, 0.0f, 1.0f);
    const float ex = u - t * dx, ey = v - t * dy;
    return ex * ex + ey * ey;
  }
};

void add_thresholds(cv::Mat& thresholds, const Polygon& polygon, const cv::Rect& box,
                    double distance) {
  std::vector<Edge> edges;
  for (std::size_t i = 0; i < polygon.size(); ++i) {
    const Point &a = polygon[i], &b = polygon[(i + 1) % polygon.size()];
    const double dx = b.x - a.x, dy = b.y - a.y, square = dx * dx + dy * dy;
    edges.push_back({static_cast<float>(a.x), static_cast<float>(a.y), static_cast<float>(dx),
                     static_cast<float>(dy), square > 0 ? static_cast<float>(1 / square) : 0});
  }
  const auto most = static_cast<float>(distance * distance);
  const auto inverse = static_cast<float>(1 / distance);
  for (int y = box.y; y < box.y + box.height; ++y) {
    std::uint8_t* to = thresholds.ptr<std::uint8_t>(y);
    for (int x = box.x; x < box.x + box.width; ++x) {
      float nearest = most;
      for (const Edge& e : edges)
        nearest =
            std::min(nearest, e.squared_distance(static_cast<float>(x), static_cast<float>(y)));
      if (nearest >= most) continue;
      const float value = 1 - std::sqrt(nearest) * inverse;
      to[x] = std::max(to[x], static_cast<std::uint8_t>(std::lround(255 * value)));
    }
  }
}

// What is left of the region, or nothing if that is empty or in pieces.
Polygon shrunk(const Polygon& polygon) {
  const Polygon whole = in_whole_pixels(polygon);
  const double distance =
      std::floor(polygon_area(whole) * shrinking / (polygon_length(whole) + 0.001) + 0.5);
  std::vector<Polygon> parts = offset_polygon(whole, -distance);
  return parts.size() == 1 ? std::move(parts[0]) : Polygon();
}

void write_targets(std::span<const TextRegion> regions, cv::Mat& flags, cv::Mat& thresholds) {
  flags.setTo(counts_bit);
  thresholds.setTo(0);
  for (const TextRegion& region : regions) {
    const Polygon& polygon = region.polygon;
    if (polygon.size() < 3) continue;
    const double area = polygon_area(polygon);
    Polygon core;
    if (!region.ignore && area >= 1 && min_area_rect(polygon).shorter_side >= least_side)
      core = shrunk(polygon);
    if (core.empty()) {
      mark(flags, pixels(polygon), counts_bit, false);
      continue;
    }
    mark(flags, pixels(core), text_bit, true);
    const double distance = area * shrinking / polygon_length(polygon);
    const std::vector<Polygon> grown = offset_polygon(polygon, distance);
    const std::vector<cv::Point> outside = pixels(grown.size() == 1 ? grown[0] : polygon);
    mark(flags, outside, threshold_bit, true);
    add_thresholds(thresholds, polygon, box_of(outside, flags.size()), distance);
  }
  for (int y = 0; y < flags.rows; ++y) {
    const std::uint8_t* f = flags.ptr<std::uint8_t>(y);
    std::uint8_t* t = thresholds.ptr<std::uint8_t>(y);
    for (int x = 0; x < flags.cols; ++x)
      if ((f[x] & threshold_bit) == 0) t[x] = 0;
  }
}

}  // namespace

void write_text_targets(std::span<const TextRegion> regions, ImageSize size,
                        std::span<std::uint8_t> flags, std::span<std::uint8_t> thresholds) {
  WEFT_ASSERT(std::ssize(flags) == size.height * size.width);
  WEFT_ASSERT(std::ssize(thresholds) == size.height * size.width);
  with_opencv([&] {
    const auto rows = static_cast<int>(size.height), columns = static_cast<int>(size.width);
    cv::Mat f(rows, columns, CV_8U, flags.data()), t(rows, columns, CV_8U, thresholds.data());
    write_targets(regions, f, t);
  });
}

}  // namespace weft
