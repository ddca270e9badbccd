// Elementwise operations. Tensors are f32 or bf16 where nothing else is said; arithmetic is f32.
#pragma once

#include "ops/dispatch.h"

namespace weft::ops {

// y = 0.5 z (1 + tanh(sqrt(2/pi) (z + 0.044715 z^3))): GELU with the tanh formula. y may be z.
WEFT_OP(gelu_forward, void(const Tensor& z, Tensor& y));
// dz = dy * gelu'(z). dz may be dy. `y`, if defined, is written with gelu(z) again (it may be z): the
// weight gradient of the next layer wants it, and keeping z alone halves what the tape must hold.
WEFT_OP(gelu_backward, void(const Tensor& z, const Tensor& dy, Tensor& dz, Tensor& y));

// y = z * sigmoid(z), f32.
WEFT_OP(silu_forward, void(const Tensor& z, Tensor& y));
// dz (+)= dy * silu'(z), f32.
WEFT_OP(silu_backward, void(const Tensor& z, const Tensor& dy, Tensor& dz, bool accumulate));

// y += x, of equal type and size.
WEFT_OP(add_inplace, void(const Tensor& x, Tensor& y));
WEFT_OP(fill_zero, void(Tensor& y));
// Copies with conversion between f32 and bf16 (round to nearest even), or from f16 to f32 (stored latents).
WEFT_OP(convert, void(const Tensor& x, Tensor& y));

// A rectangle of a token grid: `frames` frames of `tokens` tokens of every sample.
struct TokenBlock {
  std::int64_t frames = 0, tokens = 0;
  std::int64_t from_frame = 0, from_token = 0;  // its place in what is read
  std::int64_t to_frame = 0, to_token = 0;      // and in what is written
};
// Copies the block from x [B,T,S,C] to y [B,T',S',C], of one type, which may be any; the rest of y stays.
WEFT_OP(copy_tokens, void(const Tensor& x, TokenBlock block, Tensor& y));

}  // namespace weft::ops
