#include "data/text_images/outlines.h"

#include <algorithm>
#include <cmath>
#include <opencv2/imgproc.hpp>

#include "data/text_images/opencv.h"

namespace weft {

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
