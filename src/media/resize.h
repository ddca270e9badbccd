// Resize to cover, then crop the centre: how footage becomes a clip of a bucket's size, and a
// picture a reference image.
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
  template <class T>
  void cover(const VideoFrame& frame, std::int64_t height, std::int64_t width, T* out);

  std::int64_t in_height_ = 0, in_width_ = 0;
  std::vector<Tap> rows_, columns_;
};

// Scales a frame so that it just covers height x width and takes the middle: [height, width, 3].
// The scaled size and the crop are Open-Sora's resize_crop_to_fill; the kernel is Keys' cubic with
// a = -0.5, widened when shrinking, first along rows, then along columns, each rounded to 8 bits
// with 22-bit weights as Pillow does it: the same bytes.
std::vector<std::uint8_t> cover_bicubic(const VideoFrame& frame, std::int64_t height,
                                        std::int64_t width);

}  // namespace weft
