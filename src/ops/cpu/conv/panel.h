// Weights in panels, as products want them: channels side by side in vectors, read from PyTorch's
// layout. Shared by winograd*.cpp and fourier.cpp; included inside an unnamed namespace, behind
// gemm_tile.h.

#pragma once

constexpr std::int64_t panel_width = widest_tile * W;

// The upper or lower halves of a and b, element by element in turn.
static inline vf zip(vf a, vf b, bool upper) {
#if defined(__AVX512F__)
  const vi low = {0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23};
  return __builtin_shuffle(a, b, upper ? low + 8 : low);
#elif defined(__AVX2__)
  const __m256 even = _mm256_unpacklo_ps((__m256)a, (__m256)b);
  const __m256 odd = _mm256_unpackhi_ps((__m256)a, (__m256)b);
  return (vf)(upper ? _mm256_permute2f128_ps(even, odd, 0x31)
                    : _mm256_permute2f128_ps(even, odd, 0x20));
#else
  return upper ? __builtin_shuffle(a, b, vi{2, 6, 3, 7}) : __builtin_shuffle(a, b, vi{0, 4, 1, 5});
#endif
}

// v becomes its transpose.
static inline void transpose_square(vf* v) {
  vf other[W];
#pragma GCC unroll 4
  for (int stage = 1; stage < W; stage *= 2) {
#pragma GCC unroll 8
    for (int i = 0; i < W / 2; ++i) {
      other[2 * i] = zip(v[i], v[i + W / 2], false);
      other[2 * i + 1] = zip(v[i], v[i + W / 2], true);
    }
#pragma GCC unroll 16
    for (int i = 0; i < W; ++i) v[i] = other[i];
  }
}

// to [count,W] = elements [first, first + count) of `lanes` rows of `w`, `row` floats apart; lanes
// beyond are zero.
static inline void gather_lanes(const float* w, std::int64_t row, int lanes, std::int64_t first,
                                std::int64_t count, float* to) {
  for_vectors(count, [&](std::int64_t at, int n) {
    vf v[W];
    for (int o = 0; o < W; ++o) v[o] = o < lanes ? load_n(w + o * row + first + at, n) : vf{};
    transpose_square(v);
    for (int k = 0; k < n; ++k) store(to + (at + k) * W, v[k]);
  });
}
