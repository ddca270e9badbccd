// Products with weights that were put in order once, for models that are only run on the CPU. A library's product puts both
// operands in order on every call, which at the few hundred rows of a batch of captions costs what it cannot earn back.
//
// Packed weights w [N,K]: panels of 64 columns of the result, one behind the other, each [K,64], the last as wide as is left: the
// same memory. Packed rows x [M,K]: for each 256 of K one behind the other, tiles of 6 rows, each [256,6], rows past M zero.
// f32 throughout. A row's result does not depend on the other rows or on the threads.
#pragma once

#include "ops/dispatch.h"

namespace weft::ops {

// Rows that packed rows [packed_rows(M),K] take for M.
constexpr std::int64_t packed_rows(std::int64_t m) { return (m + 5) / 6 * 6; }

// w [N,K] packed in its place; 64 K floats a thread beside it while it runs.
WEFT_OP(pack_weight, void(Tensor& w));
// packed [packed_rows(M),K] from x [M,K].
WEFT_OP(pack_rows, void(const Tensor& x, Tensor& packed));
// y [M,N] = x w^T + bias[N] (+ residual [M,N]) from x [packed_rows(M),K] and w, both packed. bias and residual may be undefined;
// residual may be y.
WEFT_OP(packed_linear_forward, void(const Tensor& x, const Tensor& w, const Tensor& bias,
                                    const Tensor& residual, Tensor& y));

}  // namespace weft::ops
