#include "models/dbnet/boxes.h"

#include <algorithm>
#include <cmath>
#include <opencv2/imgproc.hpp>
#include <polyclipping/clipper.hpp>

#include "core/error.h"
#include "data/text_images/opencv.h"
#include "data/text_images/polygon.h"

namespace weft {
namespace {

using Outline = std::vector<cv::Point>;

// Mean probability within the outline, its border included, by as much memory as it spans.
double mean_within(const cv::Mat& probability, const Outline& outline) {
  const cv::Rect span = cv::boundingRect(outline);
  cv::Mat inside = cv::Mat::zeros(span.size(), CV_8U);
  cv::fillPoly(inside, std::vector<Outline>{outline}, cv::Scalar(1), cv::LINE_8, 0, -span.tl());
  return cv::mean(probability(span), inside)[0];
}

// The outline grown as far as the network was taught to shrink it; empty where there is none.
Polygon unclip(const Outline& outline, double ratio) {
  Polygon polygon;
  for (const cv::Point& p : outline)
    polygon.push_back({static_cast<double>(p.x), static_cast<double>(p.y)});
  const double distance = polygon_area(polygon) * ratio / polygon_length(polygon);
  std::vector<Polygon> grown = offset_polygon(polygon, distance);
  // Several results count as none, except where all have equally many points: the original stacks
  // them to an array then, and takes the first.
  for (const Polygon& g : grown)
    if (g.size() != grown[0].size()) return {};
  return grown.empty() ? Polygon() : std::move(grown[0]);
}

std::vector<TextBox> find(const cv::Mat& probability, const PostprocessDeck& deck) {
  const auto threshold = static_cast<float>(deck.mask_threshold);
  cv::Mat mask(probability.size(), CV_8U);
  unsigned any = 0;
  for (int y = 0; y < mask.rows; ++y) {
    const float* p = probability.ptr<float>(y);
    std::uint8_t* m = mask.ptr(y);
    for (int x = 0; x < mask.cols; ++x) any |= m[x] = p[x] > threshold;
  }
  if (any == 0) return {};

  std::vector<Outline> outlines;
  cv::findContours(mask, outlines, cv::RETR_LIST, cv::CHAIN_APPROX_SIMPLE);
  const auto looked_at =
      std::min(outlines.size(), static_cast<std::size_t>(deck.max_candidates) + 1);
  std::vector<TextBox> boxes;
  Outline outline;
  for (std::size_t i = 0; i < looked_at; ++i) {
    const double epsilon = deck.epsilon_ratio * cv::arcLength(outlines[i], true);
    cv::approxPolyDP(outlines[i], outline, epsilon, true);
    if (outline.size() < 4) continue;
    const double score = mean_within(probability, outline);
    if (score < deck.min_text_score) continue;
    const Polygon grown = unclip(outline, deck.unclip_ratio);
    if (grown.empty()) continue;
    const AreaRect rect = min_area_rect(grown);
    if (rect.shorter_side < deck.min_text_width) continue;
    TextBox& box = boxes.emplace_back();
    std::copy_n(&rect.corners[0][0], box.corners.size(), box.corners.begin());
    box.score = static_cast<float>(score);
  }
  return boxes;
}

}  // namespace

std::vector<TextBox> find_text_boxes(std::span<const float> probability, std::int64_t height,
                                     std::int64_t width, const PostprocessDeck& deck) {
  WEFT_ASSERT(height > 0 && width > 0 && height < (1 << 30) / width &&
              std::ssize(probability) == height * width);
  return with_opencv([&] {
    // OpenCV has no view of values that do not change.
    const cv::Mat map(static_cast<int>(height), static_cast<int>(width), CV_32F,
                      const_cast<float*>(probability.data()));
    return find(map, deck);
  });
}

std::int64_t count_text(std::span<const TextBox> boxes, const PostprocessDeck& deck) {
  return std::ranges::count_if(
      boxes, [&](const TextBox& b) { return b.score > static_cast<float>(deck.min_text_score); });
}

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
