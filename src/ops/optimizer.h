// A step's end: AdamW and SGD, each with EMA in one pass over the flat state, the weights' running
// averages; sums of gradients over ranks, their norms, checksums of weights.
#pragma once

#include <cstdint>

#include "ops/dispatch.h"

namespace weft::ops {

struct AdamW {
  float lr, beta1, beta2, eps, weight_decay;
  float rest1, rest2;              // 1 - beta, rounded once: 1.0f - 0.999f is off by 1e-5 of itself
  float correction1, correction2;  // 1 - beta^step
  float grad_clip;                 // largest L2 norm of the gradient; 0: not clipped
  float ema_decay;                 // 0: `ema` is not touched
};

// p -= lr ((m/c1) / (sqrt(v/c2) + eps) + wd p), ema = d ema + (1-d) p, all f32 of one length
// (docs/models/stdit3.md, Optimizer). `ema` may be undefined; `copy` (bf16 working weights) too.
// `squares` f64 [1] is the global gradient's sum of squares: the gradient is scaled by min(1,
// grad_clip / (norm + 1e-6)), and nothing at all is changed where the sum is not finite, so that no
// host needs to look before the step.
WEFT_OP(adamw_step,
        void(const AdamW& a, const Tensor& squares, const Tensor& grad, Tensor& p, Tensor& m,
             Tensor& v, Tensor& ema, Tensor& copy),
        moves(bytes(squares, grad, copy) + 2 * bytes(p, m, v, ema)));

struct Sgd {
  float lr, momentum, weight_decay;
  float grad_clip;  // as AdamW's
  float ema_decay;  // 0: `ema` is not touched
  bool first;       // the first step: `v` holds nothing yet and is not read
};

// g = grad + wd p, v = momentum v + g (first step: g), p -= lr v, ema = d ema + (1-d) p, all f32 of
// one length: PyTorch's SGD without dampening, weight decay coupled. `squares`, `ema` and `copy` as
// adamw_step's; clipping scales grad, not the decay.
WEFT_OP(sgd_step,
        void(const Sgd& a, const Tensor& squares, const Tensor& grad, Tensor& p, Tensor& v,
             Tensor& ema, Tensor& copy),
        moves(bytes(squares, grad, copy) + 2 * bytes(p, v, ema)));

// ema = d ema + (1-d) p, all f32 of one length: a further average beside the one that the steps
// above make in passing. `squares` as theirs: nothing is changed where it is not finite.
WEFT_OP(ema_step, void(float decay, const Tensor& squares, const Tensor& p, Tensor& ema),
        moves(bytes(squares, p) + 2 * bytes(ema)));

// average f32 [n] = decay * average + (1 - decay) * scale * the sum over the rows of rows[., first
// + i], f64 [rows, width]; a sum that is not finite changes nothing.
WEFT_MEMORY_OP(running_average, void(const Tensor& rows, std::int64_t width, std::int64_t first,
                                     float scale, float decay, Tensor& average));

// Sums: of squares, of bits, and of the ranks' parts of a gradient; with the conversion to the
// communication dtype.

// sum f64 [1] = sum of squares of x (added to what is there if `accumulate`), in an order that does
// not depend on the thread count. Not finite if any element is not.
WEFT_MEMORY_OP(sum_of_squares, void(const Tensor& x, Tensor& sum, bool accumulate));

// sum f64 [1] = 0 if it and all `values` f64 are finite, else NaN: to start a sum of squares with,
// so that after one step with a non-finite result no later step changes anything.
WEFT_MEMORY_OP(carry_non_finite, void(const Tensor& values, Tensor& sum));

// total f64 [1] += sum of x f32, in order.
WEFT_MEMORY_OP(add_sum, void(const Tensor& x, Tensor& total));

// sum f64 [2] = low and high half (whole numbers) of the sum, modulo 2^64, of mix(i, word i) over
// the 32-bit words of x: the same on every device, in any order of addition. A single changed bit
// always shows; so do swapped words. It guards against hardware, not against people. x takes a
// multiple of 4 bytes.
WEFT_MEMORY_OP(checksum, void(const Tensor& x, Tensor& sum));

// splitmix64's finaliser (Steele, Lea, Flood, "Fast splittable pseudorandom number generators",
// 2014) of word and place. Two different words at one place always give different results: every
// step is a bijection.
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
WEFT_MEMORY_OP(sum_parts, void(const Tensor& parts, Tensor& sum, Stream stream));
// Copies with conversion between f32 and bf16 (round to nearest even). As `convert`, but on a GPU
// in `stream`.
WEFT_MEMORY_OP(convert_on_stream, void(const Tensor& x, Tensor& y, Stream stream));

// The same over plain host memory, for a thread that is not the one that computes: neither profiled
// nor parallel.
WEFT_CPU_DECLARE(sum_terms, void(const void* const* terms, int ranks, DType type,
                                 std::int64_t count, void* sum, bool rounded))
WEFT_CPU_DECLARE(convert_range,
                 void(const void* x, DType from, void* y, DType to, std::int64_t count))

// sum[count] = terms[0] + terms[1] + ... of `type`: f32 or bf16 into f32, f64 into f64. `sum` may
// be one of the terms. `rounded`: the result is rounded to bf16, and kept as f32.
inline void sum_terms(const void* const* terms, int ranks, DType type, std::int64_t count,
                      void* sum, bool rounded) {
  on_this_cpu(WEFT_CPU_SIDES(sum_terms))(terms, ranks, type, count, sum, rounded);
}
// Equal types: a copy.
inline void convert_range(const void* x, DType from, void* y, DType to, std::int64_t count) {
  on_this_cpu(WEFT_CPU_SIDES(convert_range))(x, from, y, to, count);
}

}  // namespace weft::ops
