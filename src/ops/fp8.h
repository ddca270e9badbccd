// Products of linear layers from operands in e4m3: 8 bits, of which 4 are an exponent and 3 a
// mantissa, as tensor cores from compute capability 8.9 on multiply at twice the rate of bf16.
//
// An operand, a tensor of bf16, is multiplied by a scale of its own, rounded to e4m3 (to nearest,
// ties to even) and divided by the scale again. The scale is the greatest power of two that keeps
// the tensor's largest magnitude within e4m3's 448. So
//   - it follows from the tensor alone: nothing is kept from step to step, and a restart is exact;
//   - a rounded operand is an exact bf16 number, and the CPU, or a GPU without e4m3, rounds, then
//     multiplies in bf16: the same operands to the bit, and the same sums in f32 but for their
//     order;
//   - another scale, as from another micro-batch, changes only values below 2^-13 of the largest:
//     all others are rounded to the same three bits.
// Infinities and NaN count in no scale, and become NaN. The scale of a tensor of zeros is the
// largest one.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <limits>

#include "ops/dispatch.h"

namespace weft::ops {

// y [M,N] = x [M,K] w[N,K]^T + bias[N] (+ residual [M,N]) with x and w rounded; else as
// linear_forward (ops/matmul.h), bf16 throughout but for an f32 bias.
WEFT_SCRATCH_OP(fp8_linear_forward,
                void(const Tensor& x, const Tensor& w, const Tensor& bias, const Tensor& residual,
                     Tensor& y),
                of_fp8_product(2 * count(x) * w.dim(0), x, w));
// dx [M,K] (+)= dy [M,N] w [N,K] with dy and w rounded.
WEFT_SCRATCH_OP(fp8_linear_backward_input,
                void(const Tensor& dy, const Tensor& w, Tensor& dx, bool accumulate),
                of_fp8_product(2 * count(dy) * w.dim(1), dy, w));

// Floats that the CUDA side takes in addition to two rounded operands: the largest magnitudes of
// the pieces of each, and the two inverse scales.
constexpr std::int64_t e4m3_pieces = 1024;
constexpr std::int64_t e4m3_facts = 2 * e4m3_pieces + 2;

// ---- The format

// The scale for a largest magnitude (finite, not negative): 2^floor(log2(448 / largest)). At most
// 2^117, so that no rounded value, nor 1 / scale, is a subnormal number.
constexpr float e4m3_scale(float largest) {
  const auto bits = std::bit_cast<std::uint32_t>(largest);
  // 448 is 1.75 * 2^8.
  const int exponent = static_cast<int>(bits >> 23) - 127, above = (bits & 0x7fffffu) > 0x600000u;
  return std::bit_cast<float>(static_cast<std::uint32_t>(127 + std::min(8 - exponent - above, 117))
                              << 23);
}

// The byte nearest to x, ties to even; past 448 that of 448; 0x7f, which is NaN, for infinities and
// NaN.
constexpr std::uint8_t to_e4m3(float x) {
  const auto bits = std::bit_cast<std::uint32_t>(x);
  const std::uint32_t a = bits & 0x7fffffffu;
  // Below 2^-6 a multiple of 2^-9: adding 2^14 leaves the rounded multiple in the lowest bits. Else
  // 20 bits of mantissa go, and the exponent's bias changes from 127 to 7.
  const std::uint32_t small =
      std::bit_cast<std::uint32_t>(std::bit_cast<float>(a) + 0x1p14f) & 0xffu;
  const std::uint32_t normal = ((a + 0x7ffffu + (a >> 20 & 1u)) >> 20) - (120u << 3);
  const std::uint32_t code = std::min(a < 0x3c800000u ? small : normal, std::uint32_t{0x7e});
  return static_cast<std::uint8_t>(a >= 0x7f800000u ? 0x7fu : (bits >> 24 & 0x80u) | code);
}

constexpr float from_e4m3(std::uint8_t code) {
  const std::uint32_t a = code & 0x7fu;
  const float magnitude =
      a < 8 ? static_cast<float>(a) * 0x1p-9f : std::bit_cast<float>((a << 20) + (120u << 23));
  return a == 0x7f ? std::numeric_limits<float>::quiet_NaN() : code < 0x80 ? magnitude : -magnitude;
}

}  // namespace weft::ops
