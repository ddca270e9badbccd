#include "models/dbnet/view.h"

#include <algorithm>
#include <opencv2/imgproc.hpp>

#include "data/text_images/opencv.h"
#include "models/dbnet/dbnet.h"

namespace weft {

ViewSize view_size(ImageSize picture, std::int64_t short_side, std::int64_t long_side) {
  const auto height = static_cast<double>(picture.height);
  const auto width = static_cast<double>(picture.width);
  double scale = 1;
  if (short_side > 0)
    scale = std::min(static_cast<double>(short_side) / std::min(height, width),
                     static_cast<double>(long_side) / std::max(height, width));
  const auto scaled = [&](double n) {
    return std::max<std::int64_t>(1, static_cast<std::int64_t>(n * scale + 0.5));
  };
  ViewSize size;
  size.scaled = {scaled(height), scaled(width)};
  size.padded = {rounded_up(size.scaled.height, Dbnet::stride),
                 rounded_up(size.scaled.width, Dbnet::stride)};
  return size;
}

std::vector<std::uint8_t> detector_view(const RgbView& picture, const ViewSize& size) {
  const auto sides = [](ImageSize s) {
    return cv::Size(static_cast<int>(s.width), static_cast<int>(s.height));
  };
  const ops::PixelScale scale = dbnet_pixel_scale();
  std::vector<std::uint8_t> rgb(
      static_cast<std::size_t>(size.padded.height * size.padded.width * 3));
  with_opencv([&] {
    // OpenCV has no view of values that do not change.
    const cv::Mat from(sides({picture.height, picture.width}), CV_8UC3,
                       const_cast<std::uint8_t*>(picture.rgb),
                       static_cast<std::size_t>(picture.stride));
    cv::Mat to(sides(size.padded), CV_8UC3, rgb.data());
    to.setTo(cv::Scalar(scale.mean[0], scale.mean[1], scale.mean[2]));
    cv::Mat corner = to(cv::Rect(cv::Point(0, 0), sides(size.scaled)));
    if (from.size() == corner.size())
      from.copyTo(corner);
    else
      cv::resize(from, corner, corner.size(), 0, 0, cv::INTER_LINEAR);
  });
  return rgb;
}

}  // namespace weft
