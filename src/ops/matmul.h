// Matrix products of the linear layers, by oneDNN on the CPU (cuBLASLt on GPUs), with their
// epilogues fused. Products of the same shape always take the same path, so that a restarted run
// repeats its bits.
#pragma once

#include "ops/dispatch.h"

namespace weft::ops {

// y [M,N] = x [M,K] w[N,K]^T + bias[N] (+ residual [M,N]). x, w, y f32 or bf16 alike; bias f32 or
// of their type, may be undefined; residual undefined or of y's type and another tensor than y. f32
// accumulation. cuBLASLt adds only a bias of y's type: an f32 one is rounded by a kernel before.
WEFT_OP(linear_forward,
        void(const Tensor& x, const Tensor& w, const Tensor& bias, const Tensor& residual,
             Tensor& y),
        of_product(2 * count(x) * w.dim(0)));
// dx [M,K] (+)= dy [M,N] w [N,K].
WEFT_OP(linear_backward_input, void(const Tensor& dy, const Tensor& w, Tensor& dx, bool accumulate),
        of_product(2 * count(dy) * w.dim(1)));
// dw f32 [N,K] (+)= dy^T x, dbias f32 [N] (+)= column sums of dy (undefined: not wanted).
WEFT_OP(linear_backward_weight,
        void(const Tensor& dy, const Tensor& x, Tensor& dw, Tensor& dbias, bool accumulate),
        of_product(2 * count(dy) * x.dim(-1)));

// The first half of an MLP: z = x w^T + bias, h = gelu_tanh(z) (ops/pointwise.h). bias as above; h
// may be z where no backward follows.
WEFT_OP(linear_gelu_forward,
        void(const Tensor& x, const Tensor& w, const Tensor& bias, Tensor& z, Tensor& h),
        of_product(2 * count(x) * w.dim(0)));
// Its second half's backward: dz = (dy w) * gelu'(z), and h = gelu(z) again for the weight
// gradient (undefined: not wanted); h may be z. dbias f32 [K] (+)= column sums of dz, the first
// half's bias gradient (undefined: not wanted). A GPU's library may sum it up on the way, and then
// rounds it to dz's type.
WEFT_OP(linear_gelu_backward_input,
        void(const Tensor& dy, const Tensor& w, const Tensor& z, Tensor& dz, Tensor& h,
             Tensor& dbias, bool accumulate),
        of_product(2 * count(dy) * w.dim(1)));

// Two gradients that do not depend on each other: that of a layer's weights, and what goes to its
// input. The same as the two operations; on GPUs they may run concurrently (ops/ways.h).
//
// linear_backward_weight(dy, x, dw, dbias, accumulate) and
// linear_backward_input(dy, w, dx, accumulate_dx).
void linear_backward(const Tensor& dy, const Tensor& x, const Tensor& w, Tensor& dw, Tensor& dbias,
                     bool accumulate, Tensor& dx, bool accumulate_dx);
// linear_backward_weight(dy, h, dw, dbias, accumulate), where h = gelu(z) was kept, and
// linear_gelu_backward_input(dy, w, z, dz, undefined, dz_sums, accumulate_sums).
void linear_gelu_backward(const Tensor& dy, const Tensor& h, const Tensor& w, const Tensor& z,
                          Tensor& dw, Tensor& dbias, bool accumulate, Tensor& dz, Tensor& dz_sums,
                          bool accumulate_sums);
namespace cuda {
[[gnu::weak]] void linear_backward(const Tensor& dy, const Tensor& x, const Tensor& w, Tensor& dw,
                                   Tensor& dbias, bool accumulate, Tensor& dx, bool accumulate_dx);
[[gnu::weak]] void linear_gelu_backward(const Tensor& dy, const Tensor& h, const Tensor& w,
                                        const Tensor& z, Tensor& dw, Tensor& dbias, bool accumulate,
                                        Tensor& dz, Tensor& dz_sums, bool accumulate_sums);
}  // namespace cuda

// dbias f32 [N] (+)= column sums of dy [M,N] alone.
WEFT_MEMORY_OP(bias_gradient, void(const Tensor& dy, Tensor& dbias, bool accumulate));

// Products with weights that were packed once, for models that only run forward on the CPU. A
// library's product packs both operands on every call, which does not pay off at the few hundred
// rows of a batch of captions.
//
// Packed weights w [N,K]: panels of 64 columns of the result, one behind the other, each [K,64],
// the last as wide as is left: the same memory. Packed rows x [M,K]: for each 256 of K one behind
// the other, tiles of 6 rows, each [256,6], rows past M zero. f32 throughout. A row's result does
// not depend on the other rows or on the threads. Rows that packed rows [packed_rows(M),K] take for
// M.
constexpr std::int64_t packed_rows(std::int64_t m) { return (m + 5) / 6 * 6; }

// w [N,K] packed in its place; 64 K floats a thread beside it while it runs.
WEFT_MEMORY_OP(pack_weight, void(Tensor& w));
// packed [packed_rows(M),K] from x [M,K].
WEFT_MEMORY_OP(pack_rows, void(const Tensor& x, Tensor& packed));
// y [M,N] = x w^T + bias[N] (+ residual [M,N]) from x [packed_rows(M),K] and w, both packed. bias
// and residual may be undefined; residual may be y.
WEFT_OP(packed_linear_forward,
        void(const Tensor& x, const Tensor& w, const Tensor& bias, const Tensor& residual,
             Tensor& y),
        of_product(2 * count(y) * count(w) / w.dim(0)));

}  // namespace weft::ops
