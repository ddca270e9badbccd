// Self attention along T <= 128 frames in one kernel (temporal.cu), called by attention.cu.
#pragma once

#include "tensor/tensor.h"

namespace weft::kernels {

constexpr int temporal_max_frames = 128;

// As ops/attention.h with Axis::time.
void temporal_forward(const Tensor& qkv, const Tensor& wq, const Tensor& wk, const Tensor& rope,
                      Tensor& out, Tensor& lse);
void temporal_backward(const Tensor& qkv, const Tensor& wq, const Tensor& wk, const Tensor& rope,
                       const Tensor& out, const Tensor& lse, const Tensor& dout, Tensor& dqkv,
                       Tensor& dwq, Tensor& dwk);

}  // namespace weft::kernels
