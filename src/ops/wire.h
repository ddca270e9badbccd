// What gradients need on their way between ranks: rounding for the wire, and sums in the order of ranks.
#pragma once

#include <cstdint>

#include "ops/dispatch.h"

namespace weft::ops {

// sum[m] f32 = parts[0][m] + parts[1][m] + ...: parts [R, m], f32 or bf16, added in f32 in this order. On a GPU in `stream`.
WEFT_OP(sum_parts, void(const Tensor& parts, Tensor& sum, Stream stream));
// Copies with conversion between f32 and bf16 (round to nearest even). As `convert`, but on a GPU in `stream`.
WEFT_OP(convert_for_wire, void(const Tensor& x, Tensor& y, Stream stream));

// The same over plain host memory, for a thread that is not the one that computes: neither profiled nor parallel.
namespace cpu_v3 {
void sum_terms(const void* const* terms, int ranks, DType type, std::int64_t count, void* sum,
               bool rounded);
void convert_range(const void* x, DType from, void* y, DType to, std::int64_t count);
}  // namespace cpu_v3
namespace cpu_v4 {
void sum_terms(const void* const* terms, int ranks, DType type, std::int64_t count, void* sum,
               bool rounded);
void convert_range(const void* x, DType from, void* y, DType to, std::int64_t count);
}  // namespace cpu_v4

// sum[count] = terms[0] + terms[1] + ... of `type`: f32 or bf16 into f32, f64 into f64. `sum` may be one of the terms.
// `rounded`: the result is rounded to bf16, and kept as f32.
inline void sum_terms(const void* const* terms, int ranks, DType type, std::int64_t count,
                      void* sum, bool rounded) {
  (cpu_is_v4() ? cpu_v4::sum_terms : cpu_v3::sum_terms)(terms, ranks, type, count, sum, rounded);
}
// Equal types: a copy.
inline void convert_range(const void* x, DType from, void* y, DType to, std::int64_t count) {
  (cpu_is_v4() ? cpu_v4::convert_range : cpu_v3::convert_range)(x, from, y, to, count);
}

}  // namespace weft::ops
