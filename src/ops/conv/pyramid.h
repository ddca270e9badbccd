// What a 3x3 convolution of upsampled grids is made of (nn/pyramid_conv.h): the interpolation of
// shifted pixels as a matrix, and the weights of some of the input channels apart from the rest.
#pragma once

#include "ops/dispatch.h"

namespace weft::ops {

// Columns [first, first + 9 s s) of a [H,W,K] (f32 or bf16): in row (h, w), column first +
// (i s + j) 9 + 3 u + v, how much cell (i, j) of an s x s grid weighs in pixel (h + u - 1,
// w + v - 1) of that grid resized to H x W bilinearly (pixel centres at halves: PyTorch's
// align_corners=False); 0 where that pixel lies outside.
WEFT_OP(resize_taps, void(std::int64_t s, std::int64_t first, Tensor& a));

// Input channels [first, first + count) of a convolution's weights w [out,in,kh,kw], in w's type.
// to [out,count,kh,kw], or [kh kw,out,count].
WEFT_OP(take_input_channels, void(const Tensor& w, std::int64_t first, Tensor& to));
// Those of dw [out,in,kh,kw] (+)= from, in either of the same orders. f32.
WEFT_OP(give_input_channels,
        void(const Tensor& from, std::int64_t first, Tensor& dw, bool accumulate));

}  // namespace weft::ops
