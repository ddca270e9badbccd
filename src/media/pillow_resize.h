// Resizing that gives Pillow's bytes: a network trained or judged on pictures that Pillow scaled
// sees the same ones here.
#pragma once

#include <cstdint>
#include <vector>

namespace weft {

// Pixels [height, width, 3] that their owner keeps alive; row y begins at rgb + y * stride.
struct RgbView {
  const std::uint8_t* rgb = nullptr;
  std::int64_t height = 0, width = 0, stride = 0;  // stride in bytes
};

enum class PillowFilter { bilinear, bicubic };

// Scales to [height, width, 3] at `out`, whose rows begin `out_stride` bytes apart, as Image.resize
// of Pillow 9.4 does: a triangle, or Keys' cubic with a = -0.5, widened when shrinking; weights as
// multiples of 2^-22; along rows first, then along columns, each rounded to 8 bits; a direction
// whose size does not change is left out. Pillow 13 takes the columns first for some sizes with
// fewer rows, so its bytes differ there by one level at most.
void pillow_resize(const RgbView& in, std::int64_t height, std::int64_t width, PillowFilter filter,
                   std::uint8_t* out, std::int64_t out_stride);

// A part of a picture, in its pixels.
struct PixelWindow {
  std::int64_t top = 0, left = 0, height = 0, width = 0;
};

// That window of the picture of [height, width] pixels, the same bytes as a crop of the whole: the
// rest of it is not computed.
void pillow_resize_window(const RgbView& in, std::int64_t height, std::int64_t width,
                          PillowFilter filter, const PixelWindow& window, std::uint8_t* out,
                          std::int64_t out_stride);

// The sample that NEAREST takes for each of `out` along an axis of `in` samples. The position is a
// running sum in double, as Pillow's: on a few sizes (i + 0.5) * in / out gives others.
std::vector<std::int32_t> nearest_samples(std::int64_t in, std::int64_t out);

// Labels u8 [in_height, in_width] to [height, width] at `out` by NEAREST.
void nearest_resize(const std::uint8_t* in, std::int64_t in_height, std::int64_t in_width,
                    std::int64_t height, std::int64_t width, std::uint8_t* out);

}  // namespace weft
