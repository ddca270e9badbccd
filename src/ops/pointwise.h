// Elementwise operations. Tensors are f32 or bf16 where nothing else is said; arithmetic is f32.
#pragma once

#include "ops/dispatch.h"

namespace weft::ops {

// y = 0.5 z (1 + tanh(sqrt(2/pi) (z + 0.044715 z^3))): GELU with the tanh formula. y may be z.
WEFT_MEMORY_OP(gelu_forward, void(const Tensor& z, Tensor& y));
// dz = dy * gelu'(z). dz may be dy. `y`, if defined, is written with gelu(z) again (it may be z):
// the weight gradient of the next layer wants it, and keeping z alone halves what the tape must
// hold.
WEFT_MEMORY_OP(gelu_backward, void(const Tensor& z, const Tensor& dy, Tensor& dz, Tensor& y));

// y = gelu_tanh(gu[0]) * gu[1] over gu [2,M,F], the gates before the values: y [M,F], which may be
// gu[0].
WEFT_MEMORY_OP(gated_gelu_forward, void(const Tensor& gu, Tensor& y));

// y = z * sigmoid(z), f32.
WEFT_MEMORY_OP(silu_forward, void(const Tensor& z, Tensor& y));
// dz (+)= dy * silu'(z), f32.
WEFT_MEMORY_OP(silu_backward, void(const Tensor& z, const Tensor& dy, Tensor& dz, bool accumulate));

// y = 1 / (1 + e^-x), y of x's type. y may be x.
WEFT_MEMORY_OP(sigmoid_forward, void(const Tensor& x, Tensor& y));
// dx = dy * y (1 - y), by the result y. dx may be dy.
WEFT_MEMORY_OP(sigmoid_backward, void(const Tensor& y, const Tensor& dy, Tensor& dx));

// y = x where x > 0, else slope * x; slope 0 is ReLU. y may be x.
WEFT_MEMORY_OP(leaky_relu_forward, void(const Tensor& x, float slope, Tensor& y));
// dx = dy where y > 0, else slope * dy, by the result y, whose sign is x's for slope >= 0 (0 counts
// as below). dx may be dy.
WEFT_MEMORY_OP(leaky_relu_backward,
               void(const Tensor& y, float slope, const Tensor& dy, Tensor& dx));

// y += x, of equal type and size.
WEFT_OP(add_inplace, void(const Tensor& x, Tensor& y), moves(bytes(x) + 2 * bytes(y)));
WEFT_MEMORY_OP(fill_zero, void(Tensor& y));
// Copies with conversion between f32 and bf16 (round to nearest even), or from f16 to f32 (stored
// latents).
WEFT_MEMORY_OP(convert, void(const Tensor& x, Tensor& y));
// x itself where it is of that type, else converted, in the current arena.
inline Tensor converted(const Tensor& x, DType dtype) {
  if (x.dtype() == dtype) return x;
  Tensor y = Tensor::empty(x.shape(), dtype);
  convert(x, y);
  return y;
}

// y (+)= a * x, of one shape; f32 or bf16 each. `factor` f32 [1], if defined, multiplies a: a
// number that only the device knows.
WEFT_MEMORY_OP(scaled_add,
               void(const Tensor& x, float a, const Tensor& factor, Tensor& y, bool accumulate));

// y f32 = a + b, of one shape; a f32, b f32 or bf16.
WEFT_MEMORY_OP(add_rows, void(const Tensor& a, const Tensor& b, Tensor& y));

// Where the channels are: [B,C,T,H,W] or [B,T,H,W,C].
enum class Channels { first, last };

// y = x * a[c] + b[c], affine f32 [2,C]; types may differ. y may be x.
WEFT_MEMORY_OP(channel_affine_forward,
               void(const Tensor& x, const Tensor& affine, Channels channels, Tensor& y));
// dx (+)= dy * a[c].
WEFT_MEMORY_OP(channel_affine_backward, void(const Tensor& dy, const Tensor& affine,
                                             Channels channels, Tensor& dx, bool accumulate));

// y [N,...,C] = x * keep[n, c], keep f32 [N,C]: dropout of whole channels, and its backward. y
// may be x.
WEFT_MEMORY_OP(scale_channels, void(const Tensor& x, const Tensor& keep, Tensor& y));

// Building blocks of attention over the scales of a feature pyramid: terms per channel and per
// pixel over activations [N,T,H,W,C], f32 or bf16, all tensors of an operation of one type.
// Arithmetic is f32.

// y = x + by_channel[n,c] + by_pixel[n,t,h,w], by_channel [N,...,C] of N C values, by_pixel
// [N,T,H,W,1]; either may be undefined. y may be x. Backward: dy itself for x, for by_channel the
// column sums of each dy[n] (ops/matmul.h, bias_gradient), for by_pixel sum_channels.
WEFT_MEMORY_OP(add_outer,
               void(const Tensor& x, const Tensor& by_channel, const Tensor& by_pixel, Tensor& y));

// y [N,T,H,W,1] (+)= factor * the sum of the channels of x; factor 1/C makes it the mean.
WEFT_MEMORY_OP(sum_channels, void(const Tensor& x, float factor, Tensor& y, bool accumulate));
// Its transpose: dx [N,T,H,W,C] (+)= factor * dy [N,T,H,W,1].
WEFT_MEMORY_OP(repeat_channels, void(const Tensor& dy, float factor, Tensor& dx, bool accumulate));

// y[.., g*k + i] = x[.., g*k + i] * a[.., g]: x [N,T,H,W,C] in G groups of k = C / G channels, a
// [N,T,H,W,G]. y may be x.
WEFT_MEMORY_OP(scale_groups_forward, void(const Tensor& x, const Tensor& a, Tensor& y));
// dx = dy * a and da[.., g] = the sum over the group of dy * x; both are written, either may be
// undefined. dx may be dy.
WEFT_MEMORY_OP(scale_groups_backward,
               void(const Tensor& x, const Tensor& a, const Tensor& dy, Tensor& dx, Tensor& da));

}  // namespace weft::ops
