#include "media/resize.h"

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "core/error.h"
#include "media/pillow_resize.h"

namespace weft {

std::vector<CoverResize::Tap> CoverResize::taps(std::int64_t in, std::int64_t scaled,
                                                std::int64_t out) {
  std::vector<Tap> list(static_cast<std::size_t>(out));
  const float ratio = static_cast<float>(in) / static_cast<float>(scaled);
  const std::int64_t first = (scaled - out) / 2;
  for (std::int64_t i = 0; i < out; ++i) {
    // Half-pixel centres; beyond the first centre the edge sample repeats.
    const float at = std::max(0.0f, (static_cast<float>(first + i) + 0.5f) * ratio - 0.5f);
    const auto low = std::min(static_cast<std::int64_t>(at), in - 1);
    Tap& tap = list[static_cast<std::size_t>(i)];
    tap.low = static_cast<std::int32_t>(low);
    tap.high = static_cast<std::int32_t>(std::min(low + 1, in - 1));
    tap.weight = at - static_cast<float>(low);
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
  for (Tap& t : columns_) {  // in bytes, ready to use as offsets
    t.low *= 3;
    t.high *= 3;
  }
  in_height_ = frame.height;
  in_width_ = frame.width;
}

template <class T>
void CoverResize::cover(const VideoFrame& frame, std::int64_t height, std::int64_t width, T* out) {
  // Footage that already has the bucket's size passes through unchanged.
  if (frame.height == height && frame.width == width) {
    for (std::int64_t y = 0; y < height; ++y)
      std::copy_n(frame.rgb + y * frame.stride, width * 3, out + y * width * 3);
    return;
  }
  if (frame.height != in_height_ || frame.width != in_width_ ||
      rows_.size() != static_cast<std::size_t>(height) ||
      columns_.size() != static_cast<std::size_t>(width))
    prepare(frame, height, width);
  constexpr float half = std::is_integral_v<T> ? 0.5f : 0.0f;  // to round
  for (const Tap& row : rows_) {
    const std::uint8_t* upper = frame.rgb + row.low * frame.stride;
    const std::uint8_t* lower = frame.rgb + row.high * frame.stride;
    for (const Tap& column : columns_) {
      for (int c = 0; c < 3; ++c) {
        const float ul = upper[column.low + c], ur = upper[column.high + c];
        const float ll = lower[column.low + c], lr = lower[column.high + c];
        const float u = ul + (ur - ul) * column.weight;
        const float l = ll + (lr - ll) * column.weight;
        *out++ = static_cast<T>(u + (l - u) * row.weight + half);
      }
    }
  }
}

void CoverResize::operator()(const VideoFrame& frame, std::int64_t height, std::int64_t width,
                             std::uint8_t* out) {
  cover(frame, height, width, out);
}

void CoverResize::operator()(const VideoFrame& frame, std::int64_t height, std::int64_t width,
                             float* out) {
  cover(frame, height, width, out);
}

namespace {

// Rounds as Python's round: halves to even.
std::int64_t rounded(double x) { return static_cast<std::int64_t>(std::nearbyint(x)); }

}  // namespace

std::vector<std::uint8_t> cover_bicubic(const VideoFrame& frame, std::int64_t height,
                                        std::int64_t width) {
  WEFT_ASSERT(frame.height > 0 && frame.width > 0 && height > 0 && width > 0);
  const double rh = static_cast<double>(height) / static_cast<double>(frame.height);
  const double rw = static_cast<double>(width) / static_cast<double>(frame.width);
  const bool high = rh > rw;
  const std::int64_t h =
      high ? height : std::max(height, rounded(static_cast<double>(frame.height) * rw));
  const std::int64_t w =
      high ? std::max(width, rounded(static_cast<double>(frame.width) * rh)) : width;

  std::vector<std::uint8_t> scaled(static_cast<std::size_t>(h * w * 3));
  pillow_resize({frame.rgb, frame.height, frame.width, frame.stride}, h, w, PillowFilter::bicubic,
                scaled.data(), w * 3);

  const std::int64_t top = rounded(static_cast<double>(h - height) / 2);
  const std::int64_t left = rounded(static_cast<double>(w - width) / 2);
  std::vector<std::uint8_t> out(static_cast<std::size_t>(height * width * 3));
  for (std::int64_t y = 0; y < height; ++y)
    std::copy_n(scaled.data() + ((top + y) * w + left) * 3, width * 3, out.data() + y * width * 3);
  return out;
}

}  // namespace weft
