// Sums: of squares, of bits, and of the ranks' parts of a gradient; with the conversion to the
// communication dtype.
#pragma once

#include <cstdint>

#include "ops/dispatch.h"

namespace weft::ops {

// sum f64 [1] = sum of squares of x (added to what is there if `accumulate`), in an order that does
// not depend on the thread count. Not finite if any element is not.
WEFT_OP(sum_of_squares, void(const Tensor& x, Tensor& sum, bool accumulate));

// sum f64 [1] = 0 if it and all `values` f64 are finite, else NaN: to start a sum of squares with,
// so that after one step with a non-finite result no later step changes anything.
WEFT_OP(carry_non_finite, void(const Tensor& values, Tensor& sum));

// total f64 [1] += sum of x f32, in order.
WEFT_OP(add_sum, void(const Tensor& x, Tensor& total));

// sum f64 [2] = low and high half (whole numbers) of the sum, modulo 2^64, of mix(i, word i) over
// the 32-bit words of x: the same on every device, in any order of addition. A single changed bit
// always shows; so do swapped words. It guards against hardware, not against people. x takes a
// multiple of 4 bytes.
WEFT_OP(checksum, void(const Tensor& x, Tensor& sum));

// splitmix64's finaliser (Steele, Lea, Flood, "Fast splittable pseudorandom number generators",
// 2014) of word and place. Of two words at one place, different words always give different
// results: every step is a bijection.
#ifdef __CUDACC__
__host__ __device__
#endif
    inline constexpr std::uint64_t
    checksum_mix(std::uint64_t place, std::uint32_t word) {
  std::uint64_t z = (place << 32 ^ word) + place * 0x9e3779b97f4a7c15ull;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return z ^ (z >> 31);
}

// sum[m] f32 = parts[0][m] + parts[1][m] + ...: parts [R, m], f32 or bf16, added in f32 in this
// order. On a GPU in `stream`.
WEFT_OP(sum_parts, void(const Tensor& parts, Tensor& sum, Stream stream));
// Copies with conversion between f32 and bf16 (round to nearest even). As `convert`, but on a GPU
// in `stream`.
WEFT_OP(convert_on_stream, void(const Tensor& x, Tensor& y, Stream stream));

// The same over plain host memory, for a thread that is not the one that computes: neither profiled
// nor parallel.
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

// sum[count] = terms[0] + terms[1] + ... of `type`: f32 or bf16 into f32, f64 into f64. `sum` may
// be one of the terms. `rounded`: the result is rounded to bf16, and kept as f32.
inline void sum_terms(const void* const* terms, int ranks, DType type, std::int64_t count,
                      void* sum, bool rounded) {
  (cpu_is_v4() ? cpu_v4::sum_terms : cpu_v3::sum_terms)(terms, ranks, type, count, sum, rounded);
}
// Equal types: a copy.
inline void convert_range(const void* x, DType from, void* y, DType to, std::int64_t count) {
  (cpu_is_v4() ? cpu_v4::convert_range : cpu_v3::convert_range)(x, from, y, to, count);
}

}  // namespace weft::ops
