#include "data/text_images/polygon.h"

#include <algorithm>
#include <clipper.hpp>
#include <cmath>
#include <opencv2/imgproc.hpp>

#include "core/error.h"
#include "data/text_images/opencv.h"

namespace weft {
namespace {

// Clipper multiplies two coordinates in 64 bits below this.
constexpr double most = 1e9;

ClipperLib::IntPoint whole(const Point& p) {
  WEFT_CHECK(std::abs(p.x) <= most && std::abs(p.y) <= most, Exit::data,
             "give points in pixels of the picture", "a polygon has the point ({}, {})", p.x, p.y);
  return {static_cast<ClipperLib::cInt>(p.x), static_cast<ClipperLib::cInt>(p.y)};
}

}  // namespace

double polygon_area(std::span<const Point> polygon) {
  double twice = 0;
  for (std::size_t i = 0; i < polygon.size(); ++i) {
    const Point &a = polygon[i], &b = polygon[(i + 1) % polygon.size()];
    twice += a.x * b.y - b.x * a.y;
  }
  return std::abs(twice) / 2;
}

double polygon_length(std::span<const Point> polygon) {
  double sum = 0;
  for (std::size_t i = 0; i < polygon.size(); ++i) {
    const Point &a = polygon[i], &b = polygon[(i + 1) % polygon.size()];
    sum += std::hypot(b.x - a.x, b.y - a.y);
  }
  return sum;
}

std::vector<Polygon> offset_polygon(std::span<const Point> polygon, double distance) {
  WEFT_CHECK(std::abs(distance) <= most, Exit::data, "give points in pixels of the picture",
             "a polygon is to grow by {} pixels", distance);
  ClipperLib::Path path;
  for (const Point& p : polygon) path.push_back(whole(p));
  ClipperLib::Paths grown;
  try {
    ClipperLib::ClipperOffset offset;
    offset.AddPath(path, ClipperLib::jtRound, ClipperLib::etClosedPolygon);
    offset.Execute(grown, distance);
  } catch (const ClipperLib::clipperException& e) {
    throw Error(Exit::internal, fmt::format("Clipper: {}", e.what()),
                "this is a bug in weft, please report it with the log", __FILE__, __LINE__);
  }
  std::vector<Polygon> out;
  for (const ClipperLib::Path& g : grown) {
    Polygon& o = out.emplace_back();
    for (const ClipperLib::IntPoint& p : g)
      o.push_back({static_cast<double>(p.X), static_cast<double>(p.Y)});
  }
  return out;
}

AreaRect min_area_rect(std::span<const Point> points) {
  WEFT_ASSERT(points.size() >= 3);
  return with_opencv([&] {
    std::vector<cv::Point2f> list;
    for (const Point& p : points)
      list.emplace_back(static_cast<float>(p.x), static_cast<float>(p.y));
    const cv::RotatedRect rect = cv::minAreaRect(list);
    cv::Point2f corners[4];
    rect.points(corners);
    AreaRect out;
    for (int i = 0; i < 4; ++i) {
      out.corners[i][0] = corners[i].x;
      out.corners[i][1] = corners[i].y;
    }
    out.shorter_side = std::min(rect.size.width, rect.size.height);
    return out;
  });
}

void draw_outline(std::vector<std::uint8_t>& rgb, ImageSize size, std::span<const Point> polygon,
                  Rgb colour, int thickness) {
  constexpr double far = 1e8;  // OpenCV counts in 2^-16 of a pixel
  std::vector<cv::Point> points;
  for (const Point& p : polygon) {
    if (!std::isfinite(p.x) || !std::isfinite(p.y)) return;
    points.emplace_back(static_cast<int>(std::lround(std::clamp(p.x, -far, far))),
                        static_cast<int>(std::lround(std::clamp(p.y, -far, far))));
  }
  with_opencv([&] {
    cv::Mat to(static_cast<int>(size.height), static_cast<int>(size.width), CV_8UC3, rgb.data());
    cv::polylines(to, std::vector{points}, true, cv::Scalar(colour.r, colour.g, colour.b),
                  thickness);
  });
}

}  // namespace weft
