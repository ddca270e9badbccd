// Bilinear and nearest resizing of channels-last frames, and reflected borders. Activations are f32
// or bf16, arithmetic is f32.
//
// Bilinear: pixels are areas (PyTorch's align_corners=False). Along an axis of `in` pixels made
// `out`, pixel o lies at max((o + 0.5) in / out - 0.5, 0) and takes its two neighbours there by
// their distances; beyond the last pixel that one counts alone. Nothing is averaged: made smaller,
// pixels are skipped.
#pragma once

#include "ops/dispatch.h"

namespace weft::ops {

// The two pixels that make one, and the second's share.
struct BilinearTap {
  int first, second;
  float share;
};
#ifdef __CUDACC__
__host__ __device__
#endif
    inline BilinearTap
    bilinear_tap(int to, float ratio, int in) {
  const float at = ratio * (static_cast<float>(to) + 0.5f) - 0.5f;
  const float from = at < 0.0f ? 0.0f : at;
  int first = static_cast<int>(from);
  if (first > in - 1) first = in - 1;  // by rounding
  const float share = from - static_cast<float>(first);
  return {first, first + 1 < in ? first + 1 : first, share < 1.0f ? share : 1.0f};
}
inline float bilinear_ratio(std::int64_t in, std::int64_t out) {
  return static_cast<float>(in) / static_cast<float>(out);
}

// y [N,T,H,W,C] (+)= x [N,T,h,w,C] resized, of one type.
WEFT_OP(bilinear_forward, void(const Tensor& x, Tensor& y, bool accumulate));
// dx (+)= the transpose of that.
WEFT_OP(bilinear_backward, void(const Tensor& dy, Tensor& dx, bool accumulate));

// Nearest: along an axis of `in` pixels made `out`, pixel o is pixel floor(o in / out) (PyTorch's
// "nearest"), which is thus the source of the pixels [first(i), first(i + 1)).
#ifdef __CUDACC__
__host__ __device__
#endif
    constexpr std::int64_t
    nearest_source(std::int64_t o, std::int64_t in, std::int64_t out) {
  return o * in / out;
}
#ifdef __CUDACC__
__host__ __device__
#endif
    constexpr std::int64_t
    nearest_first(std::int64_t i, std::int64_t in, std::int64_t out) {
  return (i * out + in - 1) / in;
}

// Channels [first, first + c) of y [N,T,H,W,C] (+)= x [N,T,h,w,c] resized, of one type; its other
// channels stay.
WEFT_OP(nearest_forward, void(const Tensor& x, std::int64_t first, Tensor& y, bool accumulate));
// dx [N,T,h,w,c] (+)= the transpose of that over the channels [first, first + c) of dy
// [N,T,H,W,C].
WEFT_OP(nearest_backward, void(const Tensor& dy, std::int64_t first, Tensor& dx, bool accumulate));

// Pixel `o` of an axis of n >= 2 pixels that has one more at each end, mirrored at the pixel there
// (PyTorch's ReflectionPad2d(1)).
#ifdef __CUDACC__
__host__ __device__
#endif
    constexpr std::int64_t
    reflected_source(std::int64_t o, std::int64_t n) {
  return o == 0 ? 1 : o > n ? n - 2 : o - 1;
}

// y [N,T,up H + 2,up W + 2,C] = x [N,T,H,W,C] seen at `up` (1 or 2) times its height and width
// (nearest), in such a border; of one type. up H and up W are 2 or more.
WEFT_OP(reflect_border, void(const Tensor& x, int up, Tensor& y));

}  // namespace weft::ops
