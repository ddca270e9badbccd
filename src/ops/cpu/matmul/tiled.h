// Products of ops/matmul.h on the register tiles of gemm_tile.h, for processors other than x86-64:
// there the library of distributions has plain C++ alone, which is slower, multiplies no bf16 and
// divides the sums of narrow products among threads. Included within WEFT_CPU_BEGIN and an unnamed
// namespace, after Product.
//
// A thread takes blocks of 240 x 64 results. 256 of the depth at a time, the columns of B are
// packed into f32, and so are rows of bf16; of f32 A is read where it lies. One thread adds up an
// element, in the order of its depth: how many there are does not show.
#pragma once

#include "ops/cpu/gemm_tile.h"

#ifndef __x86_64__

constexpr std::int64_t tiled_rows = 240, tiled_columns = 64, tiled_depth = 256;

// to [rows,columns] (ld `to_ld`) = x (ld `ld`), as f32; whole vectors are written.
template <class T>
void copy_block(const T* x, std::int64_t ld, std::int64_t rows, std::int64_t columns, float* to,
                std::int64_t to_ld) {
  for (std::int64_t i = 0; i < rows; ++i)
    for_vectors(columns, [&](std::int64_t j, int n) {
      store(to + i * to_ld + j, load_n(x + i * ld + j, n));
    });
}

// Rows [k, k + depth), columns [j, j + width) of B, [depth, tiled_columns].
template <class T>
void pack_b(const Product& p, const T* b, std::int64_t k, std::int64_t depth, std::int64_t j,
            std::int64_t width, float* to) {
  if (!p.b_transposed) return copy_block(b + k * p.n + j, p.n, depth, width, to, tiled_columns);
  const T* from = b + j * p.k + k;
  if constexpr (std::is_same_v<T, float>) {
    transpose(from, p.k, width, depth, to, tiled_columns);
  } else {
    struct Rows;
    float* rows = scratch<Rows>(tiled_columns * tiled_depth);
    copy_block(from, p.k, width, depth, rows, tiled_depth);
    transpose(rows, tiled_depth, width, depth, to, tiled_columns);
  }
}

// sums [rows, tiled_columns] (+)= rows [i, i + rows) of A at depth [k, k + depth), times b.
template <class T>
void add_block(const Product& p, const T* a, std::int64_t i, std::int64_t rows, std::int64_t k,
               std::int64_t depth, const float* b, std::int64_t width, float* sums) {
  const T* from = p.a_transposed ? a + k * p.m + i : a + i * p.k + k;
  const float* at;
  std::int64_t ld;
  if constexpr (std::is_same_v<T, float>) {
    at = from;
    ld = p.a_transposed ? p.m : p.k;
  } else {
    struct PackedA;
    float* packed = scratch<PackedA>(tiled_rows * tiled_depth);
    ld = p.a_transposed ? tiled_rows : tiled_depth;
    if (p.a_transposed)
      copy_block(from, p.m, depth, rows, packed, ld);
    else
      copy_block(from, p.k, rows, depth, packed, ld);
    at = packed;
  }
  small_gemm(rows, width, depth, at, p.a_transposed ? 1 : ld, p.a_transposed ? ld : 1, b,
             tiled_columns, sums, tiled_columns, k > 0);
}

template <class T, class O>
void multiply_tiled(const Product& p, const T* a, const T* b, const float* bias, const O* residual,
                    O* c) {
#pragma omp parallel for schedule(static) collapse(2) if (p.n > tiled_columns || p.m > tiled_rows)
  for (std::int64_t j = 0; j < p.n; j += tiled_columns)
    for (std::int64_t i = 0; i < p.m; i += tiled_rows) {
      struct PackedB;
      struct Sums;
      float* const packed = scratch<PackedB>(tiled_depth * tiled_columns);
      float* const sums = scratch<Sums>(tiled_rows * tiled_columns);
      const std::int64_t width = std::min(tiled_columns, p.n - j),
                         rows = std::min(tiled_rows, p.m - i);
      if (p.k == 0) std::fill_n(sums, rows * tiled_columns, 0.0f);
      for (std::int64_t k = 0; k < p.k; k += tiled_depth) {
        const std::int64_t depth = std::min(tiled_depth, p.k - k);
        pack_b(p, b, k, depth, j, width, packed);
        add_block(p, a, i, rows, k, depth, packed, width, sums);
      }
      for (std::int64_t r = 0; r < rows; ++r)
        for_vectors(width, [&](std::int64_t q, int n) {
          const std::int64_t at = (i + r) * p.n + j + q;
          vf v = load(sums + r * tiled_columns + q);
          if (p.accumulate) v += load_n(c + at, n);
          if (p.bias) v += load_n(bias + j + q, n);
          if (p.residual) v += load_n(residual + at, n);
          store_n(c + at, v, n);
        });
    }
}

#endif
