#include "models/dbnet/frame.h"

#include <algorithm>
#include <cmath>

#include "core/error.h"

namespace weft {
namespace {

// The longer side cut to whole pixels as int(side * long / short) of Python.
std::int64_t scaled(std::int64_t length, std::int64_t shorter, std::int64_t side) {
  return static_cast<std::int64_t>(static_cast<double>(side * length) /
                                   static_cast<double>(shorter));
}

// Halves to even, as Python's round.
std::int64_t middle(std::int64_t length, std::int64_t side) {
  return static_cast<std::int64_t>(std::nearbyint(static_cast<double>(length - side) / 2));
}

}  // namespace

std::vector<std::uint8_t> detector_frame(const RgbView& picture, std::int64_t side) {
  WEFT_ASSERT(picture.height > 0 && picture.width > 0 && side > 0);
  const std::int64_t shorter = std::min(picture.height, picture.width);
  const std::int64_t height = scaled(picture.height, shorter, side),
                     width = scaled(picture.width, shorter, side);
  std::vector<std::uint8_t> out(static_cast<std::size_t>(side * side * 3));
  pillow_resize_window(picture, height, width, PillowFilter::bilinear,
                       {middle(height, side), middle(width, side), side, side}, out.data(),
                       side * 3);
  return out;
}

}  // namespace weft
