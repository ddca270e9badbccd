// Matrix products of the linear layers, by oneDNN on the CPU (cuBLASLt on GPUs), with their epilogues fused.
// Products of the same shape always take the same path, so that a restarted run repeats its bits.
#pragma once

#include "ops/dispatch.h"

namespace weft::ops {

// y [M,N] = x [M,K] w[N,K]^T + bias[N] (+ residual [M,N]). bias f32, may be undefined; x, w, y f32 or bf16 alike;
// residual undefined or of y's type and another tensor than y. f32 accumulation.
WEFT_OP(linear_forward, void(const Tensor& x, const Tensor& w, const Tensor& bias,
                             const Tensor& residual, Tensor& y));
// dx [M,K] (+)= dy [M,N] w [N,K].
WEFT_OP(linear_backward_input,
        void(const Tensor& dy, const Tensor& w, Tensor& dx, bool accumulate));
// dw f32 [N,K] (+)= dy^T x, dbias f32 [N] (+)= column sums of dy (undefined: not wanted).
WEFT_OP(linear_backward_weight,
        void(const Tensor& dy, const Tensor& x, Tensor& dw, Tensor& dbias, bool accumulate));

// The first half of an MLP: z = x w^T + bias, h = gelu_tanh(z) (ops/pointwise.h). h may be z where nothing follows back.
WEFT_OP(linear_gelu_forward,
        void(const Tensor& x, const Tensor& w, const Tensor& bias, Tensor& z, Tensor& h));
// Its second half's backward: dz = (dy w) * gelu'(z), and h = gelu(z) again for the weight gradient. h may be z.
WEFT_OP(linear_gelu_backward_input,
        void(const Tensor& dy, const Tensor& w, const Tensor& z, Tensor& dz, Tensor& h));

// dbias f32 [N] (+)= column sums of dy [M,N] alone.
WEFT_OP(bias_gradient, void(const Tensor& dy, Tensor& dbias, bool accumulate));

}  // namespace weft::ops

namespace weft::kernels {

// CUDA side: names the table of measured choices among the library's algorithms, made where it is missing; "" for none. Without a
// table the library's first proposal is taken. A job that was run with a table repeats its bits with that same table.
// The environment's WEFT_MATMUL_CACHE is the default. A weak symbol, as the operations.
[[gnu::weak]] void set_matmul_tuning(const std::string& path);

}  // namespace weft::kernels
