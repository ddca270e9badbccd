// Self attention along frames in one kernel (temporal.cu, temporal_mma.cu), called by attention.cu.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "tensor/tensor.h"

namespace weft::kernels {

// As ops/attention.h with Axis::time. False, and nothing done, for what they do not take: flash
// attention takes everything.
bool temporal_forward(const Tensor& qkv, const Tensor& wq, const Tensor& wk, const Tensor& rope,
                      Tensor& out, Tensor& lse);
bool temporal_backward(const Tensor& qkv, const Tensor& wq, const Tensor& wk, const Tensor& rope,
                       const Tensor& out, const Tensor& lse, const Tensor& dout, Tensor& dqkv,
                       Tensor& dwq, Tensor& dwk);

}  // namespace weft::kernels

// What its two files share on the host's side.
namespace weft::kernels::temporal {

// On tensor cores; false, and nothing done, for types, sizes and addresses that those kernels do
// not take.
bool mma_forward(const Tensor& qkv, const Tensor& wq, const Tensor& wk, const Tensor& rope,
                 Tensor& out, Tensor& lse);
bool mma_backward(const Tensor& qkv, const Tensor& wq, const Tensor& wk, const Tensor& rope,
                  const Tensor& out, const Tensor& lse, const Tensor& dout, Tensor& dqkv,
                  Tensor& dwq, Tensor& dwk);

// Blocks that share `units` of the backward, each with sums of its own: of the shape alone, so that
// sums repeat.
inline int pieces(std::int64_t units) {
  return static_cast<int>(std::min<std::int64_t>(units, 4096));
}
// dwq [D] += the first D rows' sums of partial f32 [2 D, pieces], dwk [D] += the others'.
void add_pieces(const Tensor& partial, Tensor& dwq, Tensor& dwk);

inline float inverse_root(std::int64_t D) { return 1.0f / std::sqrt(static_cast<float>(D)); }

}  // namespace weft::kernels::temporal
