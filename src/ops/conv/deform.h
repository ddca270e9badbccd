// Modulated deformable 3x3 convolutions (DCNv2, arXiv:1811.11168) over channels-last frames, as
// columns of sampled values for a matrix product (nn/deform_conv.h puts the two together).
//
// offsets [N,T,h,w,27] are what the offset convolution gives for each pixel of the result: (dy, dx)
// of the 9 taps, row by row of the kernel, then 9 logits of their masks. Tap (i, j) of pixel
// (y, x) reads at row y * stride - top + i * dilation + dy, column alike: bilinear, neighbours
// outside of the frame count as 0, and a place a whole pixel or more outside reads 0. The value is
// multiplied by sigmoid(logit). Activations are f32 or bf16, x and offsets alike; arithmetic is
// f32.
#pragma once

#include <cmath>

#include "ops/conv.h"

namespace weft::ops {

constexpr int deform_taps = 9, deform_channels = 3 * deform_taps;

// Where a tap reads. The pixel `row`, `column` is the upper left of four, `below` and `right` are
// the shares of the others; any of the four may lie outside. Inside: at least one of them can
// count.
struct DeformPlace {
  int row, column;
  float below, right;
  bool inside;
};
#ifdef __CUDACC__
__host__ __device__
#endif
    inline DeformPlace
    deform_place(float y, float x, int H, int W) {
  // Written so that a NaN is outside.
  if (!(y > -1.0f && y < static_cast<float>(H) && x > -1.0f && x < static_cast<float>(W)))
    return {0, 0, 0.0f, 0.0f, false};
  const float row = std::floor(y), column = std::floor(x);
  return {static_cast<int>(row), static_cast<int>(column), y - row, x - column, true};
}

// columns [P,9,C] = what the taps of pixels [first, first + P) of the result read in x [N,T,H,W,C];
// pixels are counted through all frames. `conv` is the convolution's geometry: kernel 3x3, one
// group.
WEFT_OP(deform_columns, void(const Tensor& x, const Tensor& offsets, Conv conv, std::int64_t first,
                             Tensor& columns));
// The gradient of the offsets and logits of the same pixels, from that of the columns: those rows
// of doffsets [N,T,h,w,27] are written.
WEFT_OP(deform_backward_offsets,
        void(const Tensor& x, const Tensor& offsets, const Tensor& dcolumns, Conv conv,
             std::int64_t first, Tensor& doffsets));
// dx f32 [N,T,H,W,C] += the gradient of x by the same pixels, in an order that does not depend on
// the thread count. On a GPU each pixel of x gathers from the list of those who read it, so that
// bits repeat there too: of the arena 12 bytes for each of the 36 P values read, and 8 for each
// pixel of x.
WEFT_SCRATCH_OP(deform_backward_input, void(const Tensor& offsets, const Tensor& dcolumns,
                                            Conv conv, std::int64_t first, Tensor& dx));

}  // namespace weft::ops
