// Resizing: to cover a size and crop the centre, which is how footage becomes clips and a picture a
// reference image; and as Pillow does, to the byte.
#pragma once

#include <cstdint>
#include <vector>

#include "media/video_reader.h"

namespace weft {

// Scales a frame so that it just covers height x width and takes the middle, as Open-Sora's
// resize_crop does: if H/h > W/w the scaled size is (H, round(w*H/h)), otherwise
// (round(h*W/w), W); the crop begins at half the excess, rounded down. Bilinear with half-pixel
// centres (align_corners false) and WITHOUT antialiasing. That is why this is our own code:
// swscale and avfilter widen the kernel when they shrink, which trains on softer pictures than the
// released weights saw. Positions and weights are f32, as PyTorch's interpolate has them.
class CoverResize {
 public:
  // `out` is [height, width, 3], rounded to the nearest of 256 levels, as clips are stored, where
  // the original goes on in f32: a difference of at most half a level. The tables are kept for
  // frames of the same size.
  void operator()(const VideoFrame& frame, std::int64_t height, std::int64_t width,
                  std::uint8_t* out);
  // The same unrounded, 0 to 255.
  void operator()(const VideoFrame& frame, std::int64_t height, std::int64_t width, float* out);

 private:
  struct Tap {
    std::int32_t low = 0, high = 0;  // the two samples to blend
    float weight = 0;                // of `high`
  };
  static std::vector<Tap> taps(std::int64_t in, std::int64_t scaled, std::int64_t out);
  void prepare(const VideoFrame& frame, std::int64_t height, std::int64_t width);
  const std::uint8_t* row_of(const VideoFrame& frame, std::int64_t y);
  template <class T>
  void cover(const VideoFrame& frame, std::int64_t height, std::int64_t width, T* out);

  std::int64_t in_height_ = 0, in_width_ = 0;
  std::vector<Tap> rows_, columns_;
  // What the vectors of cover() load: the taps of `columns_`, as far as 4 bytes from each lie in
  // the row.
  std::vector<std::int32_t> low_, high_;
  std::vector<float> weights_;
  // The last even and the last odd row of a frame of YUV that were converted.
  std::vector<std::uint8_t> converted_[2];
  std::int64_t converted_row_[2] = {-1, -1};
};

// Scales a frame so that it just covers height x width and takes the middle: [height, width, 3].
// The scaled size and the crop are Open-Sora's resize_crop_to_fill; the kernel is Keys' cubic with
// a = -0.5, widened when shrinking, first along rows, then along columns, each rounded to 8 bits
// with 22-bit weights as Pillow does it: the same bytes.
std::vector<std::uint8_t> cover_bicubic(const VideoFrame& frame, std::int64_t height,
                                        std::int64_t width);

// What follows gives Pillow's bytes: a network trained or judged on pictures that Pillow scaled
// sees the same ones here.

// Pixels [height, width, 3] that their owner keeps alive; row y begins at rgb + y * stride.
struct RgbView {
  const std::uint8_t* rgb = nullptr;
  std::int64_t height = 0, width = 0, stride = 0;  // stride in bytes
};

enum class PillowFilter { bilinear, bicubic, lanczos };

// Scales to [height, width, 3] at `out`, whose rows begin `out_stride` bytes apart, as Image.resize
// of Pillow 9.4 does: a triangle, Keys' cubic with a = -0.5, or sinc(x) sinc(x / 3), widened when
// shrinking; weights as
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

// Scales to f32 [height, width, 3] at `out`, of bytes as -1 to 1, as PyTorch's interpolate does
// with mode "bicubic": Keys' cubic with a = -0.75 at pixels' centres, edges repeated, not widened
// when shrinking. Values leave -1 to 1.
void bicubic_resize(const RgbView& in, std::int64_t height, std::int64_t width, float* out);

// The sample that NEAREST takes for each of `out` along an axis of `in` samples. The position is a
// running sum in double, as Pillow's: on a few sizes (i + 0.5) * in / out gives others.
std::vector<std::int32_t> nearest_samples(std::int64_t in, std::int64_t out);

// Labels u8 [in_height, in_width] to [height, width] at `out` by NEAREST.
void nearest_resize(const std::uint8_t* in, std::int64_t in_height, std::int64_t in_width,
                    std::int64_t height, std::int64_t width, std::uint8_t* out);

}  // namespace weft
