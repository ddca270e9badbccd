// One head of one sequence as in head.h, with products of bf16 summed in f32: twice the rate on
// processors with AVX512_BF16. As on a GPU, rows are rounded after norm and rotation, and so are
// probabilities and gradients of scores; sums, maxima and exponentials stay f32. The scale of the
// scores is applied to them, for on q it would take part in its rounding. A product's
// operands lie in pairs along its depth, so a matrix that is multiplied along its rows and along
// its columns is kept in both orders. Included inside WEFT_CPU_BEGIN/END.

#pragma once

#include "ops/cpu/attention/head.h"

#ifdef __AVX512F__

// Assembly for the same reason as in gemm_tile.h.
static inline vh nearest_bf16(vf v) {
  vh h;
  asm("vcvtneps2bf16 %1, %0" : "=v"(h) : "v"(v));
  return h;
}

// Of each lane a pair: first, second.
static inline void store_pairs(Pair* to, vf first, vf second) {
  const vu pairs = __builtin_convertvector(nearest_bf16(first), vu) |
                   __builtin_convertvector(nearest_bf16(second), vu) << 16;
  __builtin_memcpy(to, &pairs, sizeof pairs);
}

// W values of one row as W / 2 pairs.
static inline void store_halves(Pair* to, vf v) {
  const vh h = nearest_bf16(v);
  __builtin_memcpy(to, &h, sizeof h);
}

// Pairs along the rows: to [n, dp / 2] from [n, dp].
inline void pairs_in_rows(const float* from, std::int64_t n, std::int64_t dp, Pair* to) {
  for (std::int64_t i = 0; i < n * dp; i += W) store_halves(to + i / 2, load(from + i));
}

// Pairs across the rows: to [ceil(n / 2), dp]; the partner of an odd last row is zero.
inline void pairs_of_rows(const float* from, std::int64_t n, std::int64_t dp, Pair* to) {
  for (std::int64_t r = 0; r < n; r += 2)
    for (std::int64_t i = 0; i < dp; i += W) {
      const float* at = from + r * dp + i;
      store_pairs(to + r / 2 * dp + i, load(at), r + 1 < n ? load(at + dp) : vf{});
    }
}

// Memory of a head in units of four bytes, handed out from the front.
struct Pieces {
  float* at;
  float* floats(std::int64_t n) { return std::exchange(at, at + n); }
  Pair* pairs(std::int64_t n) { return reinterpret_cast<Pair*>(floats(n)); }
};

inline void head_forward_bf16(std::int64_t nq, std::int64_t nk, std::int64_t d, Rows<const bf16> q,
                              Rows<const bf16> k, Rows<const bf16> v, const Prepare& pq,
                              const Prepare& pk, Rows<bf16> out, float* lse) {
  const std::int64_t dp = padded(d), np = padded_stride(nk), qb = std::min(query_block, nq);
  const std::int64_t d2 = (d + 1) / 2, nk2 = (nk + 1) / 2;
  const float factor = 1.0f / std::sqrt(static_cast<float>(d));
  Pieces memory{scratch<Scratch>(static_cast<std::size_t>(
      nk * dp + nk * dp / 2 + d2 * np + nk2 * dp + 5 * qb * dp / 2 + 3 * qb * np / 2 + qb))};
  float* rows_f32 = memory.floats(nk * dp);
  Pair *keys = memory.pairs(nk * dp / 2), *keys_t = memory.pairs(d2 * np);
  Pair *values = memory.pairs(nk2 * dp), *queries = memory.pairs(qb * dp / 2);
  float *block = memory.floats(qb * dp), *scores = memory.floats(qb * np);
  Pair* p = memory.pairs(qb * np / 2);
  float *result = memory.floats(qb * dp), *inverse = memory.floats(qb);
  pack<bf16>(k, 0, nk, d, pk, 1.0f, rows_f32);
  pairs_in_rows(rows_f32, nk, dp, keys);
  transpose(keys, dp / 2, nk, d2, keys_t, np);
  pack<bf16>(v, 0, nk, d, Prepare{}, 1.0f, rows_f32);
  pairs_of_rows(rows_f32, nk, dp, values);
  for (std::int64_t first = 0; first < nq; first += qb) {
    const std::int64_t rows = std::min(qb, nq - first);
    pack<bf16>(q, first, rows, d, pq, 1.0f, block);
    pairs_in_rows(block, rows, dp, queries);
    small_gemm(rows, nk, d2, queries, dp / 2, 1, keys_t, np, scores, np, false);
    softmax_rows(scores, rows, nk, np, factor, inverse, lse + first);
    for (std::int64_t r = 0; r < rows; ++r)
      pairs_in_rows(scores + r * np, 1, padded(nk), p + r * np / 2);
    small_gemm(rows, dp, nk2, p, np / 2, 1, values, dp, result, dp, false);
    for (std::int64_t r = 0; r < rows; ++r) {
      bf16* to = out[first + r];
      for_vectors(d, [&](std::int64_t i, int m) {
        store_n(to + i, load(result + r * dp + i) * inverse[r], m);
      });
    }
  }
}

inline void head_backward_bf16(std::int64_t nq, std::int64_t nk, std::int64_t d, Rows<const bf16> q,
                               Rows<const bf16> k, Rows<const bf16> v, const Prepare& pq,
                               const Prepare& pk, Rows<const bf16> dout, const float* lse,
                               Rows<bf16> dq, Rows<bf16> dk, Rows<bf16> dv, float* dwq,
                               float* dwk) {
  const std::int64_t dp = padded(d), np = padded_stride(nk), qb = std::min(query_block, nq);
  const std::int64_t d2 = (d + 1) / 2, nk2 = (nk + 1) / 2, qb2 = (qb + 1) / 2;
  const float factor = 1.0f / std::sqrt(static_cast<float>(d));
  Pieces memory{scratch<Scratch>(
      static_cast<std::size_t>(2 * nk * dp + nk * dp / 2 + 2 * d2 * np + nk2 * dp + 2 * qb * dp +
                               qb * dp + 2 * qb2 * dp + 2 * qb * np + 2 * qb2 * np + qb * np / 2))};
  float *dkeys = memory.floats(nk * dp), *dvalues = memory.floats(nk * dp);
  Pair *in_rows = memory.pairs(nk * dp / 2), *keys_t = memory.pairs(d2 * np);
  Pair *values_t = memory.pairs(d2 * np), *keys = memory.pairs(nk2 * dp);
  float *block = memory.floats(qb * dp), *dqueries = memory.floats(qb * dp);
  Pair *queries = memory.pairs(qb * dp / 2), *queries_t = memory.pairs(qb2 * dp);
  Pair *dresult = memory.pairs(qb * dp / 2), *dresult_t = memory.pairs(qb2 * dp);
  float *scores = memory.floats(qb * np), *dscores = memory.floats(qb * np);
  Pair *p_t = memory.pairs(qb2 * np), *ds_t = memory.pairs(qb2 * np);
  Pair* ds = memory.pairs(qb * np / 2);
  // dkeys holds the rows of values and keys until gradients take their place.
  pack<bf16>(v, 0, nk, d, Prepare{}, 1.0f, dkeys);
  pairs_in_rows(dkeys, nk, dp, in_rows);
  transpose(in_rows, dp / 2, nk, d2, values_t, np);
  pack<bf16>(k, 0, nk, d, pk, 1.0f, dkeys);
  pairs_in_rows(dkeys, nk, dp, in_rows);
  transpose(in_rows, dp / 2, nk, d2, keys_t, np);
  pairs_of_rows(dkeys, nk, dp, keys);
  for (std::int64_t first = 0; first < nq; first += qb) {
    const std::int64_t rows = std::min(qb, nq - first), rows2 = (rows + 1) / 2;
    const bool later = first > 0;
    pack<bf16>(q, first, rows, d, pq, 1.0f, block);
    pairs_in_rows(block, rows, dp, queries);
    pairs_of_rows(block, rows, dp, queries_t);
    pack<bf16>(dout, first, rows, d, Prepare{}, 1.0f, block);
    pairs_in_rows(block, rows, dp, dresult);
    pairs_of_rows(block, rows, dp, dresult_t);
    small_gemm(rows, nk, d2, queries, dp / 2, 1, keys_t, np, scores, np, false);
    small_gemm(rows, nk, d2, dresult, dp / 2, 1, values_t, np, dscores, np, false);
    for (std::int64_t r = 0; r < rows; r += 2) {
      float delta[2] = {};
      const int two = r + 1 < rows ? 2 : 1;
      for (int j = 0; j < two; ++j)
        delta[j] = probabilities(scores + (r + j) * np, dscores + (r + j) * np, nk,
                                 lse[first + r + j], factor);
      for (std::int64_t i = 0; i < nk; i += W) {
        vf p[2] = {}, g[2] = {};
        for (int j = 0; j < two; ++j) {
          const std::int64_t at = (r + j) * np + i;
          p[j] = load(scores + at);
          g[j] = p[j] * (factor * (load(dscores + at) - delta[j]));
          store_halves(ds + at / 2, g[j]);
        }
        store_pairs(p_t + r / 2 * np + i, p[0], p[1]);
        store_pairs(ds_t + r / 2 * np + i, g[0], g[1]);
      }
    }
    small_gemm(nk, dp, rows2, p_t, 1, np, dresult_t, dp, dvalues, dp, later);
    small_gemm(nk, dp, rows2, ds_t, 1, np, queries_t, dp, dkeys, dp, later);
    small_gemm(rows, dp, nk2, ds, np / 2, 1, keys, dp, dqueries, dp, false);
    unpack_gradient<bf16>(q, first, rows, d, pq, 1.0f, dqueries, dq, dwq);
  }
  unpack_gradient<bf16>(k, 0, nk, d, pk, 1.0f, dkeys, dk, dwk);
  unpack_gradient<bf16>(v, 0, nk, d, Prepare{}, 1.0f, dvalues, dv, nullptr);
}

#endif
