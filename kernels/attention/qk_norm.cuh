// RMSNorm and rotary embedding of q and k before flash attention, and its gradient.
#pragma once

#include "ops/attention.h"
#include "tensor/tensor.h"

namespace weft::kernels {

constexpr float qk_norm_epsilon = 1e-6f;

// qk [B,T,S,2,H,D] = rope(norm(q, k of qkv [B,T,S,3,H,D])), as ops/attention.h; wq, wk or rope may
// be undefined. The position of a row is its index along `axis`.
void qk_norm_forward(const Tensor& qkv, const Tensor& wq, const Tensor& wk, const Tensor& rope,
                     ops::Axis axis, Tensor& qk);

// In place: on entry the q and k parts of dqkv hold the gradient of qk, on return that of q and k.
// dwq, dwk f32 [D] are added to (undefined: not wanted or no norm).
void qk_norm_backward(const Tensor& qkv, const Tensor& wq, const Tensor& wk, const Tensor& rope,
                      ops::Axis axis, Tensor& dqkv, Tensor& dwq, Tensor& dwk);

}  // namespace weft::kernels
