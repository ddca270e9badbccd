// Small matrix products on scratch memory, for attention: C[m,n] (+)= A B, with A read through two strides (so it
// may be a transpose) and B, C row-major with rows of a whole number of vectors. Included after simd.h.

// Rows of C held in registers: MR * NV accumulators, NV vectors of B and one of A must fit.
#ifdef __AVX512F__
constexpr int tile_rows = 6, tile_vectors = 4;
#else
constexpr int tile_rows = 4, tile_vectors = 3;
#endif

template <int MR, int NV>
static inline void tile(std::int64_t depth, const float* a, std::int64_t row_stride,
                        std::int64_t depth_stride, const float* b, std::int64_t ldb, float* c,
                        std::int64_t ldc, bool accumulate) {
  vf acc[MR][NV];
#pragma GCC unroll 8
  for (int i = 0; i < MR; ++i)
#pragma GCC unroll 4
    for (int j = 0; j < NV; ++j) acc[i][j] = accumulate ? load(c + i * ldc + j * W) : vf{};
  for (std::int64_t k = 0; k < depth; ++k) {
    vf bv[NV];
#pragma GCC unroll 4
    for (int j = 0; j < NV; ++j) bv[j] = load(b + k * ldb + j * W);
#pragma GCC unroll 8
    for (int i = 0; i < MR; ++i) {
      const vf av = splat(a[i * row_stride + k * depth_stride]);
#pragma GCC unroll 4
      for (int j = 0; j < NV; ++j) acc[i][j] += av * bv[j];
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < MR; ++i)
#pragma GCC unroll 4
    for (int j = 0; j < NV; ++j) store(c + i * ldc + j * W, acc[i][j]);
}

template <int NV>
static inline void tile_rows_of(int rows, std::int64_t depth, const float* a,
                                std::int64_t row_stride, std::int64_t depth_stride, const float* b,
                                std::int64_t ldb, float* c, std::int64_t ldc, bool accumulate) {
  switch (rows) {
    case 1: return tile<1, NV>(depth, a, row_stride, depth_stride, b, ldb, c, ldc, accumulate);
    case 2: return tile<2, NV>(depth, a, row_stride, depth_stride, b, ldb, c, ldc, accumulate);
    case 3: return tile<3, NV>(depth, a, row_stride, depth_stride, b, ldb, c, ldc, accumulate);
    case 4: return tile<4, NV>(depth, a, row_stride, depth_stride, b, ldb, c, ldc, accumulate);
    case 5: return tile<5, NV>(depth, a, row_stride, depth_stride, b, ldb, c, ldc, accumulate);
    case 6: return tile<6, NV>(depth, a, row_stride, depth_stride, b, ldb, c, ldc, accumulate);
  }
}

// A(i,k) = a[i*row_stride + k*depth_stride]; n is rounded up to whole vectors, which B and C must have.
static inline void small_gemm(std::int64_t m, std::int64_t n, std::int64_t depth, const float* a,
                              std::int64_t row_stride, std::int64_t depth_stride, const float* b,
                              std::int64_t ldb, float* c, std::int64_t ldc, bool accumulate) {
  const std::int64_t vectors = (n + W - 1) / W;
  for (std::int64_t j = 0; j < vectors; j += tile_vectors) {
    const float* bj = b + j * W;
    const int width = static_cast<int>(vectors - j < tile_vectors ? vectors - j : tile_vectors);
    for (std::int64_t i = 0; i < m; i += tile_rows) {
      const int rows = static_cast<int>(m - i < tile_rows ? m - i : tile_rows);
      const float* ai = a + i * row_stride;
      float* cij = c + i * ldc + j * W;
      switch (width) {
        case 1:
          tile_rows_of<1>(rows, depth, ai, row_stride, depth_stride, bj, ldb, cij, ldc, accumulate);
          break;
        case 2:
          tile_rows_of<2>(rows, depth, ai, row_stride, depth_stride, bj, ldb, cij, ldc, accumulate);
          break;
        case 3:
          tile_rows_of<3>(rows, depth, ai, row_stride, depth_stride, bj, ldb, cij, ldc, accumulate);
          break;
        default:
          tile_rows_of<4>(rows, depth, ai, row_stride, depth_stride, bj, ldb, cij, ldc, accumulate);
      }
    }
  }
}

// to[d, i] = from[i, d] for n rows of `from` (ld `from_ld`), `to` having `to_ld` floats a row.
static inline void transpose(const float* from, std::int64_t from_ld, std::int64_t n,
                             std::int64_t depth, float* to, std::int64_t to_ld) {
  // Blocks of 16 rows keep the lines being written to in the cache.
  for (std::int64_t i0 = 0; i0 < n; i0 += 16) {
    const std::int64_t i1 = i0 + 16 < n ? i0 + 16 : n;
    for (std::int64_t d = 0; d < depth; ++d)
      for (std::int64_t i = i0; i < i1; ++i) to[d * to_ld + i] = from[i * from_ld + d];
  }
}
