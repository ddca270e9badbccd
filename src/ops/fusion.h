// What attention over the scales of a feature pyramid is made of: terms a channel and terms a pixel
// over activations [N,T,H,W,C], f32 or bf16, all tensors of an operation of one type. Arithmetic
// is f32.
#pragma once

#include "ops/dispatch.h"

namespace weft::ops {

// y = x + by_channel[n,c] + by_pixel[n,t,h,w], by_channel [N,...,C] of N C values, by_pixel
// [N,T,H,W,1]; either may be undefined. y may be x. Backward: dy itself for x, for by_channel the
// column sums of each dy[n] (ops/matmul.h, bias_gradient), for by_pixel sum_channels.
WEFT_OP(add_outer,
        void(const Tensor& x, const Tensor& by_channel, const Tensor& by_pixel, Tensor& y));

// y [N,T,H,W,1] (+)= factor * the sum of the channels of x; factor 1/C makes it the mean.
WEFT_OP(sum_channels, void(const Tensor& x, float factor, Tensor& y, bool accumulate));
// Its transpose: dx [N,T,H,W,C] (+)= factor * dy [N,T,H,W,1].
WEFT_OP(repeat_channels, void(const Tensor& dy, float factor, Tensor& dx, bool accumulate));

// y[.., g*k + i] = x[.., g*k + i] * a[.., g]: x [N,T,H,W,C] in G groups of k = C / G channels, a
// [N,T,H,W,G]. y may be x.
WEFT_OP(scale_groups_forward, void(const Tensor& x, const Tensor& a, Tensor& y));
// dx = dy * a and da[.., g] = the sum over the group of dy * x; both are written, either may be
// undefined. dx may be dy.
WEFT_OP(scale_groups_backward,
        void(const Tensor& x, const Tensor& a, const Tensor& dy, Tensor& dx, Tensor& da));

}  // namespace weft::ops
