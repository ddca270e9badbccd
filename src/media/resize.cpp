#include "media/resize.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace weft {

std::vector<CoverResize::Tap> CoverResize::taps(std::int64_t in, std::int64_t scaled,
                                                std::int64_t out) {
  std::vector<Tap> list(static_cast<std::size_t>(out));
  const double ratio = static_cast<double>(in) / static_cast<double>(scaled);
  const std::int64_t first = (scaled - out) / 2;
  for (std::int64_t i = 0; i < out; ++i) {
    // Half-pixel centres; beyond the first centre the edge sample repeats.
    const double at = std::max(0.0, (static_cast<double>(first + i) + 0.5) * ratio - 0.5);
    const auto low = std::min(static_cast<std::int64_t>(at), in - 1);
    Tap& tap = list[static_cast<std::size_t>(i)];
    tap.low = static_cast<std::int32_t>(low);
    tap.high = static_cast<std::int32_t>(std::min(low + 1, in - 1));
    tap.weight = static_cast<float>(at - static_cast<double>(low));
  }
  return list;
}

void CoverResize::prepare(const VideoFrame& frame, std::int64_t height, std::int64_t width) {
  const double fh = static_cast<double>(height) / static_cast<double>(frame.height);
  const double fw = static_cast<double>(width) / static_cast<double>(frame.width);
  // nearbyint rounds halves to even, as Python's round does.
  const std::int64_t scaled_height =
      fh > fw ? height
              : std::max(height, static_cast<std::int64_t>(
                                     std::nearbyint(static_cast<double>(frame.height) * fw)));
  const std::int64_t scaled_width =
      fh > fw ? std::max(width, static_cast<std::int64_t>(
                                    std::nearbyint(static_cast<double>(frame.width) * fh)))
              : width;
  rows_ = taps(frame.height, scaled_height, height);
  columns_ = taps(frame.width, scaled_width, width);
  for (Tap& t : columns_) {  // in bytes, ready for use
    t.low *= 3;
    t.high *= 3;
  }
  in_height_ = frame.height;
  in_width_ = frame.width;
}

void CoverResize::operator()(const VideoFrame& frame, std::int64_t height, std::int64_t width,
                             std::uint8_t* out) {
  // Footage that was made for the bucket passes through untouched.
  if (frame.height == height && frame.width == width) {
    for (std::int64_t y = 0; y < height; ++y)
      std::memcpy(out + y * width * 3, frame.rgb + y * frame.stride,
                  static_cast<std::size_t>(width * 3));
    return;
  }
  if (frame.height != in_height_ || frame.width != in_width_ ||
      rows_.size() != static_cast<std::size_t>(height) ||
      columns_.size() != static_cast<std::size_t>(width))
    prepare(frame, height, width);
  for (const Tap& row : rows_) {
    const std::uint8_t* upper = frame.rgb + row.low * frame.stride;
    const std::uint8_t* lower = frame.rgb + row.high * frame.stride;
    for (const Tap& column : columns_) {
      for (int c = 0; c < 3; ++c) {
        const float ul = upper[column.low + c], ur = upper[column.high + c];
        const float ll = lower[column.low + c], lr = lower[column.high + c];
        const float u = ul + (ur - ul) * column.weight;
        const float l = ll + (lr - ll) * column.weight;
        *out++ = static_cast<std::uint8_t>(u + (l - u) * row.weight + 0.5f);
      }
    }
  }
}

}  // namespace weft
