// Small matrix products on scratch memory, for attention and convolutions: C[m,n] (+)= A B, with A
// read through two strides (so it may be a transpose) and B, C row-major with rows of a whole
// number of vectors. Elements of A and B are floats, or pairs of bf16 that follow each other along
// the depth; C is f32. What C holds is added at the end, not summed on: sums of sums round less
// than a long one.

#pragma once

#include "ops/cpu/simd.h"

// Rows and vectors of C held in registers at a time: their product is the number of accumulators,
// and NV vectors of B and one of A must fit beside them. Fewer vectors go with more rows, or the
// chain of additions would wait for itself.
constexpr bool many_registers = vector_registers == 32;
constexpr int widest_tile = many_registers ? 4 : 3;
template <int NV>
constexpr int rows_of_tile = NV == 4   ? 6
                             : NV == 3 ? (many_registers ? 8 : 4)
                             : NV == 2 ? (many_registers ? 12 : 6)
                                       : (many_registers ? 12 : 8);

using Pair = std::uint32_t;  // two bf16, the first in the lower half

static inline vf vector_at(const float* p) { return load(p); }
static inline vf everywhere(const float* p) { return splat(*p); }
static inline vf add_product(const float*, vf sum, vf a, vf b) { return sum + a * b; }
#ifdef __AVX512F__
static inline vf vector_at(const Pair* p) {
  vf v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}
static inline vf everywhere(const Pair* p) {
  Pair pair;
  __builtin_memcpy(&pair, p, sizeof pair);  // what lies there are bf16
  return (vf)(pair - vu{});
}
// Assembly, for the instruction set that the file is compiled for ends before AVX512_BF16.
static inline vf add_product(const Pair*, vf sum, vf a, vf b) {
  asm("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
  return sum;
}
#endif

#ifdef __AVX512F__
// W pairs of one row and the next (null: zeros), of which n count.
static inline vu pairs_of(const bf16* one, const bf16* two, int n) {
  const auto bits = [n](const bf16* x) {
    if (x == nullptr) return _mm256_setzero_si256();
    if (n == W) return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x));
    return _mm256_maskz_loadu_epi16(first_lanes(n), x);
  };
  return (vu)_mm512_or_si512(_mm512_cvtepu16_epi32(bits(one)),
                             _mm512_slli_epi32(_mm512_cvtepu16_epi32(bits(two)), 16));
}
#endif

// A function of its own: inlined beside others, the compiler keeps accumulators in memory.
template <int MR, int NV, class E>
[[gnu::noinline]] static void tile(std::int64_t depth, const E* a, std::int64_t row_stride,
                                   std::int64_t depth_stride, const E* b, std::int64_t ldb,
                                   float* c, std::int64_t ldc, bool accumulate) {
  vf acc[MR][NV];
#pragma GCC unroll 12
  for (int i = 0; i < MR; ++i)
#pragma GCC unroll 4
    for (int j = 0; j < NV; ++j) acc[i][j] = vf{};
  for (std::int64_t k = 0; k < depth; ++k) {
    vf bv[NV];
#pragma GCC unroll 4
    for (int j = 0; j < NV; ++j) bv[j] = vector_at(b + k * ldb + j * W);
#pragma GCC unroll 12
    for (int i = 0; i < MR; ++i) {
      const vf av = everywhere(a + i * row_stride + k * depth_stride);
#pragma GCC unroll 4
      for (int j = 0; j < NV; ++j) acc[i][j] = add_product(a, acc[i][j], av, bv[j]);
    }
  }
#pragma GCC unroll 12
  for (int i = 0; i < MR; ++i)
#pragma GCC unroll 4
    for (int j = 0; j < NV; ++j) {
      float* to = c + i * ldc + j * W;
      store(to, accumulate ? load(to) + acc[i][j] : acc[i][j]);
    }
}

// The last rows of a panel, fewer than a whole tile.
template <int NV, int MR, class E>
static inline void last_rows(int rows, std::int64_t depth, const E* a, std::int64_t row_stride,
                             std::int64_t depth_stride, const E* b, std::int64_t ldb, float* c,
                             std::int64_t ldc, bool accumulate) {
  if constexpr (MR > 0) {
    if (rows == MR)
      tile<MR, NV>(depth, a, row_stride, depth_stride, b, ldb, c, ldc, accumulate);
    else
      last_rows<NV, MR - 1>(rows, depth, a, row_stride, depth_stride, b, ldb, c, ldc, accumulate);
  }
}

template <int NV, class E>
static inline void panel(std::int64_t m, std::int64_t depth, const E* a, std::int64_t row_stride,
                         std::int64_t depth_stride, const E* b, std::int64_t ldb, float* c,
                         std::int64_t ldc, bool accumulate) {
  constexpr int MR = rows_of_tile<NV>;
  std::int64_t i = 0;
  for (; i + MR <= m; i += MR)
    tile<MR, NV>(depth, a + i * row_stride, row_stride, depth_stride, b, ldb, c + i * ldc, ldc,
                 accumulate);
  last_rows<NV, MR - 1>(static_cast<int>(m - i), depth, a + i * row_stride, row_stride,
                        depth_stride, b, ldb, c + i * ldc, ldc, accumulate);
}

// A(i,k) = a[i*row_stride + k*depth_stride]; n is rounded up to whole vectors, which B and C must
// have. Depth, strides of A and ldb count elements: pairs, where they are pairs.
template <class E>
static void small_gemm(std::int64_t m, std::int64_t n, std::int64_t depth, const E* a,
                       std::int64_t row_stride, std::int64_t depth_stride, const E* b,
                       std::int64_t ldb, float* c, std::int64_t ldc, bool accumulate) {
  std::int64_t left = (n + W - 1) / W;
  while (left > 0) {
    // 5 vectors are 3 + 2 rather than 4 + 1.
    std::int64_t width = left < widest_tile ? left : widest_tile;
    if (left == widest_tile + 1) width = widest_tile - 1;
    switch (width) {
      case 1:
        panel<1>(m, depth, a, row_stride, depth_stride, b, ldb, c, ldc, accumulate);
        break;
      case 2:
        panel<2>(m, depth, a, row_stride, depth_stride, b, ldb, c, ldc, accumulate);
        break;
      case 3:
        panel<3>(m, depth, a, row_stride, depth_stride, b, ldb, c, ldc, accumulate);
        break;
      default:
        if constexpr (widest_tile == 4)
          panel<4>(m, depth, a, row_stride, depth_stride, b, ldb, c, ldc, accumulate);
    }
    b += width * W;
    c += width * W;
    left -= width;
  }
}

// Floats from one row to the next in scratch of n columns: an odd number of vectors, so that a
// column does not fall on few sets of the first-level cache.
static inline std::int64_t padded_stride(std::int64_t n) { return ((n + W - 1) / W | 1) * W; }

#ifdef __AVX512F__
// A block of 16 x 16 elements of four bytes, by halves of what is left: neighbours, pairs,
// quarters.
static inline void transpose_block(const void* from, std::int64_t from_ld, void* to,
                                   std::int64_t to_ld) {
  const auto* const in = static_cast<const std::uint32_t*>(from);
  auto* const out = static_cast<std::uint32_t*>(to);
  __m512i a[16], b[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) a[i] = _mm512_loadu_si512(in + i * from_ld);
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
    b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4)
#pragma GCC unroll 2
    for (int j = 0; j < 2; ++j) {
      a[i + 2 * j] = _mm512_unpacklo_epi64(b[i + j], b[i + j + 2]);
      a[i + 2 * j + 1] = _mm512_unpackhi_epi64(b[i + j], b[i + j + 2]);
    }
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    const __m512i even[2] = {_mm512_shuffle_i32x4(a[j], a[j + 4], 0x88),
                             _mm512_shuffle_i32x4(a[j + 8], a[j + 12], 0x88)};
    const __m512i odd[2] = {_mm512_shuffle_i32x4(a[j], a[j + 4], 0xdd),
                            _mm512_shuffle_i32x4(a[j + 8], a[j + 12], 0xdd)};
    _mm512_storeu_si512(out + j * to_ld, _mm512_shuffle_i32x4(even[0], even[1], 0x88));
    _mm512_storeu_si512(out + (j + 4) * to_ld, _mm512_shuffle_i32x4(odd[0], odd[1], 0x88));
    _mm512_storeu_si512(out + (j + 8) * to_ld, _mm512_shuffle_i32x4(even[0], even[1], 0xdd));
    _mm512_storeu_si512(out + (j + 12) * to_ld, _mm512_shuffle_i32x4(odd[0], odd[1], 0xdd));
  }
}
#endif

#ifndef __AVX2__
// A block of 4 x 4.
static inline void transpose_block(const float* from, std::int64_t ld, float* to,
                                   std::int64_t to_ld) {
  const auto lower = [](vf a, vf b) { return __builtin_shuffle(a, b, vi{0, 4, 1, 5}); };
  const auto upper = [](vf a, vf b) { return __builtin_shuffle(a, b, vi{2, 6, 3, 7}); };
  const vf a = load(from), b = load(from + ld), c = load(from + 2 * ld), d = load(from + 3 * ld);
  const vf ac = lower(a, c), bd = lower(b, d), ac_last = upper(a, c), bd_last = upper(b, d);
  store(to, lower(ac, bd));
  store(to + to_ld, upper(ac, bd));
  store(to + 2 * to_ld, lower(ac_last, bd_last));
  store(to + 3 * to_ld, upper(ac_last, bd_last));
}
#endif

// to[d, i] = from[i, d] for n rows of `from` (ld `from_ld`), `to` having `to_ld` elements a row.
template <class E>
static void transpose(const E* from, std::int64_t from_ld, std::int64_t n, std::int64_t depth,
                      E* to, std::int64_t to_ld) {
  static_assert(sizeof(E) == 4);
  // Blocks of 16 rows keep the lines being written to in the cache.
  for (std::int64_t i0 = 0; i0 < n; i0 += 16) {
    const std::int64_t i1 = i0 + 16 < n ? i0 + 16 : n;
    std::int64_t d = 0;
#if defined(__AVX512F__)
    for (; i1 - i0 == 16 && d + 16 <= depth; d += 16)
      transpose_block(from + i0 * from_ld + d, from_ld, to + d * to_ld + i0, to_ld);
#elif !defined(__AVX2__)
    for (; i1 - i0 == 16 && d + 4 <= depth; d += 4)
      for (std::int64_t i = i0; i < i1; i += 4)
        transpose_block(from + i * from_ld + d, from_ld, to + d * to_ld + i, to_ld);
#endif
    for (; d < depth; ++d)
      for (std::int64_t i = i0; i < i1; ++i)
        __builtin_memcpy(&to[d * to_ld + i], &from[i * from_ld + d], sizeof(E));
  }
}
