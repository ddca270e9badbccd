// Small matrix products on scratch memory, for attention: C[m,n] (+)= A B, with A read through two
// strides (so it may be a transpose) and B, C row-major with rows of a whole number of vectors.
// Elements of A and B are floats, or pairs of bf16 that follow each other along the depth; C is
// f32. What C holds is added at the end, not summed on: sums of sums round less than a long one.

#pragma once

#include "ops/cpu/simd.h"

// Rows and vectors of C held in registers at a time: their product is the number of accumulators,
// and NV vectors of B and one of A must fit beside them. Fewer vectors go with more rows, or the
// chain of additions would wait for itself.
#ifdef __AVX512F__
constexpr int widest_tile = 4;
template <int NV>
constexpr int rows_of_tile = NV == 4   ? 6
                             : NV == 3 ? 8
                                       : 12;
#else
constexpr int widest_tile = 3;
template <int NV>
constexpr int rows_of_tile = NV == 3   ? 4
                             : NV == 2 ? 6
                                       : 8;
#endif

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
static inline vf everywhere(const Pair* p) { return (vf)(*p - vu{}); }
// Assembly, for the instruction set that the file is compiled for ends before AVX512_BF16.
static inline vf add_product(const Pair*, vf sum, vf a, vf b) {
  asm("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
  return sum;
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

// to[d, i] = from[i, d] for n rows of `from` (ld `from_ld`), `to` having `to_ld` elements a row.
template <class E>
static void transpose(const E* from, std::int64_t from_ld, std::int64_t n, std::int64_t depth,
                      E* to, std::int64_t to_ld) {
  // Blocks of 16 rows keep the lines being written to in the cache.
  for (std::int64_t i0 = 0; i0 < n; i0 += 16) {
    const std::int64_t i1 = i0 + 16 < n ? i0 + 16 : n;
    for (std::int64_t d = 0; d < depth; ++d)
      for (std::int64_t i = i0; i < i1; ++i) to[d * to_ld + i] = from[i * from_ld + d];
  }
}
