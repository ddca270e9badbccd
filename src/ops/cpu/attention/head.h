// Attention of one head of one sequence, of f32 or bf16: rows of q, k and v are normalised, rotated
// and packed into scratch memory, a block of keys at a time; the scores of a block of queries stay
// in the cache, and the products are the register tiles of gemm_tile.h. With several blocks of keys
// the softmax's maximum and sum follow from block to block, as do the results and the gradients of
// the queries, which scratch memory then keeps for all queries. A row's sums are made in the order
// of its blocks, whatever other rows are computed beside it. Included within WEFT_CPU_BEGIN and an
// unnamed namespace.
#pragma once

#include "ops/cpu/gemm_tile.h"

constexpr float epsilon = 1e-6f;
constexpr std::int64_t query_block = 96;
std::int64_t padded(std::int64_t n) { return (n + W - 1) / W * W; }

// Row i of a head lies at base + i * stride.
template <class T>
struct Rows {
  T* base;
  std::int64_t stride;
  T* operator[](std::int64_t i) const { return base + i * stride; }
};

// Queries, keys and channels of a head. Keys are taken `block` at a time, or all at once where the
// block holds them. last_bias is added to the score of the last key.
struct Head {
  std::int64_t nq, nk, d, block;
  float last_bias = 0;

  bool several() const { return block < nk; }  // blocks of keys
};

// q/k RMSNorm and rotary embedding of one projection; either may be absent.
struct Prepare {
  const float* weight = nullptr;  // [padded D]
  const float* cosine = nullptr;  // [positions, padded D], each value twice
  const float* sine = nullptr;    // the same with the sign of the even elements flipped

  bool nothing() const { return weight == nullptr && cosine == nullptr; }
};

// The partner of each element within its interleaved pair.
vf swap_pairs(vf x) {
  vi index;
  for (int i = 0; i < W; ++i) index[i] = i ^ 1;
  return __builtin_shuffle(x, index);
}

// inverse[r] = 1 / the root mean square of row first + r. All sums come before the first division,
// which each row would otherwise wait for.
constexpr std::int64_t rms_rows = 64;
template <class T>
void inverse_rms(Rows<const T> x, std::int64_t first, std::int64_t n, std::int64_t d,
                 float* inverse) {
  for (std::int64_t r = 0; r < n; ++r) {
    const T* in = x[first + r];
    vf squares{};
    for_vectors(d, [&](std::int64_t i, int m) {
      __builtin_prefetch((r + 8 < n ? in + 8 * x.stride : in + d) + i);
      const vf v = load_n(in + i, m);
      squares += v * v;
    });
    inverse[r] = hsum(squares);
  }
  for (std::int64_t r = 0; r < n; ++r)
    inverse[r] = 1.0f / std::sqrt(inverse[r] / static_cast<float>(d) + epsilon);
}

// to[i, 0..dp) = rope(norm(x_i)) * factor, zero beyond d.
template <class T>
void pack(Rows<const T> x, std::int64_t first, std::int64_t n, std::int64_t d, const Prepare& p,
          float factor, float* to) {
  const std::int64_t dp = padded(d);
  float scales[rms_rows];
  for (std::int64_t r = 0; r < n; ++r) {
    if (p.weight && r % rms_rows == 0)
      inverse_rms(x, first + r, std::min(rms_rows, n - r), d, scales);
    const T* in = x[first + r];
    float* out = to + r * dp;
    const float scale = p.weight ? factor * scales[r % rms_rows] : factor;
    const float* c = p.cosine ? p.cosine + (first + r) * dp : nullptr;
    const float* s = p.sine ? p.sine + (first + r) * dp : nullptr;
    for_vectors(d, [&](std::int64_t i, int m) {
      if (!p.weight) __builtin_prefetch((r + 8 < n ? in + 8 * x.stride : in + d) + i);
      vf v = load_n(in + i, m) * scale;
      if (p.weight) v *= load(p.weight + i);
      if (c) v = v * load(c + i) + swap_pairs(v) * load(s + i);
      store(out + i, v);
    });
  }
}

// The transpose of pack for gradients: g [n, dp] w.r.t. the packed rows -> dx rows, dw += (if not
// null).
template <class T>
void unpack_gradient(Rows<const T> x, std::int64_t first, std::int64_t n, std::int64_t d,
                     const Prepare& p, float factor, float* g, Rows<T> dx, float* dw) {
  const std::int64_t dp = padded(d);
  float scales[rms_rows];
  for (std::int64_t r = 0; r < n; ++r) {
    if (p.weight && r % rms_rows == 0)
      inverse_rms(x, first + r, std::min(rms_rows, n - r), d, scales);
    const T* in = x[first + r];
    T* out = dx[first + r];
    float* gr = g + r * dp;
    if (p.cosine) {
      const float *c = p.cosine + (first + r) * dp, *s = p.sine + (first + r) * dp;
      for (std::int64_t i = 0; i < d; i += W) {
        const vf v = load(gr + i);
        // The transpose of a rotation turns back: the sine changes its sign.
        store(gr + i, v * load(c + i) - swap_pairs(v) * load(s + i));
      }
    }
    if (!p.weight) {
      for_vectors(d, [&](std::int64_t i, int m) { store_n(out + i, load(gr + i) * factor, m); });
      continue;
    }
    const float rstd = scales[r % rms_rows];
    vf dot{};
    for_vectors(d, [&](std::int64_t i, int m) {
      const vf normed = load_n(in + i, m) * rstd;
      const vf gi = load(gr + i) * factor;
      dot += gi * load(p.weight + i) * normed;
      if (dw) store(dw + i, load(dw + i) + gi * normed);
    });
    const float mean = hsum(dot) / static_cast<float>(d);
    for_vectors(d, [&](std::int64_t i, int m) {
      const vf normed = load_n(in + i, m) * rstd;
      const vf gi = load(gr + i) * factor * load(p.weight + i);
      store_n(out + i, rstd * (gi - normed * mean), m);
    });
  }
}

inline void add_to_last(float* scores, std::int64_t rows, std::int64_t n, std::int64_t np,
                        float bias) {
  if (bias != 0.0f)
    for (std::int64_t r = 0; r < rows; ++r) scores[r * np + n - 1] += bias;
}

// The softmax of a block of keys: scores [rows, np], of which n columns count, times `factor`
// become exp(score - largest so far), which put(row, column, values) takes. `top` (the largest) and
// `sum` (of the exponentials) of each row follow from block to block, and so do the results [rows,
// dp] of the blocks before.
template <class T, class Put>
void softmax_rows(const float* scores, std::int64_t rows, std::int64_t n, std::int64_t np,
                  float factor, bool first_block, float* top, float* sum, float* results,
                  std::int64_t dp, Put&& put) {
  for (std::int64_t r = 0; r < rows; ++r) {
    const float* s = scores + r * np;
    vf largest = splat(-INFINITY);
    for_vectors(n, [&](std::int64_t i, int m) {
      const vf v = load(s + i);
      largest = vmax(largest, m == W ? v : select_first(v, m, -INFINITY));
    });
    float max = hmax(largest) * factor, before = 0.0f;
    if (!first_block) {
      before = sum[r];
      if (max > top[r]) {
        const float shrink = std::exp(top[r] - max);
        before *= shrink;
        for (std::int64_t i = 0; i < dp; i += W)
          store(results + r * dp + i, load(results + r * dp + i) * shrink);
      } else {
        max = top[r];
      }
    }
    vf added{};
    for_vectors(n, [&](std::int64_t i, int m) {
      vf e = vexp_for<T>(load(s + i) * factor - max);
      if (m < W) e = select_first(e, m, 0.0f);
      added += e;
      put(r, i, e);
    });
    top[r] = max;
    sum[r] = before + hsum(added);
  }
}

// Rows of results, whose blocks of keys have all come: top becomes log-sum-exp.
template <class T>
void finish_rows(const float* results, std::int64_t first, std::int64_t rows, std::int64_t d,
                 float* top, const float* sum, Rows<T> out) {
  const std::int64_t dp = padded(d);
  for (std::int64_t r = 0; r < rows; ++r) {
    T* to = out[first + r];
    // Divided by the softmax's sum only now: d values a row instead of nk.
    const float inverse = 1.0f / sum[r];
    top[r] += std::log(sum[r]);
    for_vectors(d, [&](std::int64_t i, int m) {
      store_n(to + i, load(results + r * dp + i) * inverse, m);
    });
  }
}

// A row of n scores, times `factor`, becomes probabilities, zero up to a whole vector, where
// `gradients` become zero too. Returns the softmax's correction, their sum of products: dout * out
// instead would bring in the rounding of out.
template <class T>
float probabilities(float* scores, float* gradients, std::int64_t n, float lse, float factor) {
  vf dot{};
  for_vectors(n, [&](std::int64_t i, int m) {
    vf p = vexp_for<T>(load(scores + i) * factor - lse), g = load(gradients + i);
    if (m < W) {  // beyond the row's end the scratch is not written
      p = select_first(p, m, 0.0f);
      g = select_first(g, m, 0.0f);
      store(gradients + i, g);
    }
    store(scores + i, p);
    dot += p * g;
  });
  return hsum(dot);
}

// delta[i] = dout_i * out_i: the same correction, where a row's keys come in several blocks.
template <class T>
void row_deltas(std::int64_t n, std::int64_t d, Rows<const T> out, Rows<const T> dout,
                float* delta) {
  for (std::int64_t r = 0; r < n; ++r) {
    vf sum{};
    for_vectors(
        d, [&](std::int64_t i, int m) { sum += load_n(out[r] + i, m) * load_n(dout[r] + i, m); });
    delta[r] = hsum(sum);
  }
}

struct Scratch;

template <class T>
void head_forward(const Head& head, Rows<const T> q, Rows<const T> k, Rows<const T> v,
                  const Prepare& pq, const Prepare& pk, Rows<T> out, float* lse) {
  const std::int64_t nq = head.nq, nk = head.nk, d = head.d, kb = std::min(head.block, nk);
  const std::int64_t dp = padded(d), np = padded_stride(kb), qb = std::min(query_block, nq);
  const std::int64_t kept = head.several() ? nq : qb;
  const float factor = 1.0f / std::sqrt(static_cast<float>(d));
  float* keys = scratch<Scratch>(
      static_cast<std::size_t>(2 * kb * dp + d * np + qb * dp + qb * np + kept * dp + nq));
  float *values = keys + kb * dp, *keys_t = values + kb * dp, *queries = keys_t + d * np;
  float *scores = queries + qb * dp, *results = scores + qb * np, *sums = results + kept * dp;
  for (std::int64_t key = 0; key < nk; key += kb) {
    const std::int64_t n = std::min(kb, nk - key);
    const bool last = key + n == nk;
    pack<T>(k, key, n, d, pk, 1.0f, keys);
    // Columns beyond n hold whatever the scratch held: their products are never read.
    transpose(keys, dp, n, d, keys_t, np);
    pack<T>(v, key, n, d, Prepare{}, 1.0f, values);
    for (std::int64_t first = 0; first < nq; first += qb) {
      const std::int64_t rows = std::min(qb, nq - first);
      float* result = results + (head.several() ? first * dp : 0);
      pack<T>(q, first, rows, d, pq, factor, queries);
      small_gemm(rows, n, d, queries, dp, 1, keys_t, np, scores, np, false);
      if (last) add_to_last(scores, rows, n, np, head.last_bias);
      softmax_rows<float>(
          scores, rows, n, np, 1.0f, key == 0, lse + first, sums + first, result, dp,
          [&](std::int64_t r, std::int64_t i, vf e) { store(scores + r * np + i, e); });
      small_gemm(rows, dp, n, scores, np, 1, values, dp, result, dp, key > 0);
      if (last) finish_rows<T>(result, first, rows, d, lse + first, sums + first, out);
    }
  }
}

template <class T>
void head_backward(const Head& head, Rows<const T> q, Rows<const T> k, Rows<const T> v,
                   const Prepare& pq, const Prepare& pk, Rows<const T> out, Rows<const T> dout,
                   const float* lse, Rows<T> dq, Rows<T> dk, Rows<T> dv, float* dwq, float* dwk) {
  const std::int64_t nq = head.nq, nk = head.nk, d = head.d, kb = std::min(head.block, nk);
  const std::int64_t dp = padded(d), np = padded_stride(kb), qb = std::min(query_block, nq);
  const bool several = head.several();
  const std::int64_t kept = several ? nq : qb;
  const float factor = 1.0f / std::sqrt(static_cast<float>(d));
  float* keys = scratch<Scratch>(static_cast<std::size_t>(3 * kb * dp + 2 * d * np + 2 * qb * dp +
                                                          kept * dp + 2 * qb * np + nq));
  float *dkeys = keys + kb * dp, *dvalues = dkeys + kb * dp;
  float *keys_t = dvalues + kb * dp, *values_t = keys_t + d * np, *queries = values_t + d * np;
  float *dresult = queries + qb * dp, *dqueries = dresult + qb * dp;
  float *scores = dqueries + kept * dp, *dscores = scores + qb * np, *deltas = dscores + qb * np;
  if (several) row_deltas<T>(nq, d, out, dout, deltas);
  for (std::int64_t key = 0; key < nk; key += kb) {
    const std::int64_t n = std::min(kb, nk - key);
    const bool last = key + n == nk;
    // dvalues first holds the values themselves, until their transpose is made.
    pack<T>(v, key, n, d, Prepare{}, 1.0f, dvalues);
    pack<T>(k, key, n, d, pk, 1.0f, keys);
    transpose(dvalues, dp, n, d, values_t, np);
    transpose(keys, dp, n, d, keys_t, np);
    for (std::int64_t first = 0; first < nq; first += qb) {
      const std::int64_t rows = std::min(qb, nq - first);
      const bool later = first > 0;
      float* dquery = dqueries + (several ? first * dp : 0);
      pack<T>(q, first, rows, d, pq, factor, queries);
      pack<T>(dout, first, rows, d, Prepare{}, 1.0f, dresult);
      small_gemm(rows, n, d, queries, dp, 1, keys_t, np, scores, np, false);
      small_gemm(rows, n, d, dresult, dp, 1, values_t, np, dscores, np, false);
      if (last) add_to_last(scores, rows, n, np, head.last_bias);
      for (std::int64_t r = 0; r < rows; ++r) {
        float *s = scores + r * np, *ds = dscores + r * np;
        const float sum = probabilities<float>(s, ds, n, lse[first + r], 1.0f);
        const float delta = several ? deltas[first + r] : sum;
        for_vectors(
            n, [&](std::int64_t i, int) { store(ds + i, load(s + i) * (load(ds + i) - delta)); });
      }
      small_gemm(n, dp, rows, scores, 1, np, dresult, dp, dvalues, dp, later);
      small_gemm(n, dp, rows, dscores, 1, np, queries, dp, dkeys, dp, later);
      small_gemm(rows, dp, n, dscores, np, 1, keys, dp, dquery, dp, key > 0);
      if (last) unpack_gradient<T>(q, first, rows, d, pq, factor, dquery, dq, dwq);
    }
    unpack_gradient<T>(k, key, n, d, pk, 1.0f, dkeys, dk, dwk);
    unpack_gradient<T>(v, key, n, d, Prepare{}, 1.0f, dvalues, dv, nullptr);
  }
}

// One head of one sequence as above, with products of bf16 summed in f32: twice the rate on
// processors with AVX512_BF16. As on a GPU, rows are rounded after norm and rotation, and so are
// probabilities and gradients of scores; sums, maxima and exponentials stay f32. The scale of the
// scores is applied to them, for on q it would take part in its rounding. A product's
// operands lie in pairs along its depth, so a matrix that is multiplied along its rows and along
// its columns is kept in both orders.

#ifdef __AVX512F__

// Assembly for the same reason as in gemm_tile.h.
static inline vh nearest_bf16(vf v) {
  vh h;
  asm("vcvtneps2bf16 %1, %0" : "=v"(h) : "v"(v));
  return h;
}

// Stores a pair for each lane: first, second.
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

// The same from rows of bf16 as they lie, zeros behind their d values.
inline void pairs_of_rows(Rows<const bf16> x, std::int64_t first, std::int64_t n, std::int64_t d,
                          Pair* to) {
  const std::int64_t dp = padded(d);
  for (std::int64_t r = 0; r < n; r += 2) {
    const bf16 *one = x[first + r], *two = r + 1 < n ? x[first + r + 1] : nullptr;
    for_vectors(d, [&](std::int64_t i, int m) {
      const vu pairs = pairs_of(one + i, two ? two + i : nullptr, m);
      __builtin_memcpy(to + r / 2 * dp + i, &pairs, sizeof pairs);
    });
  }
}

// Rows of a product's operand in pairs along them, `stride` pairs apart.
struct PairRows {
  const Pair* at;
  std::int64_t stride;
};

// Rows of x, normed and rotated, as pairs along them (in `along`, or where they lie if nothing is
// to be done to them; null: not wanted) and across them (in `across`, null: not wanted).
inline PairRows operand(Rows<const bf16> x, std::int64_t first, std::int64_t n, std::int64_t d,
                        const Prepare& p, float* block, Pair* along, Pair* across) {
  const std::int64_t dp = padded(d);
  if (p.nothing() && d % 2 == 0 && x.stride % 2 == 0) {
    if (across) pairs_of_rows(x, first, n, d, across);
    return {reinterpret_cast<const Pair*>(x[first]), x.stride / 2};
  }
  pack<bf16>(x, first, n, d, p, 1.0f, block);
  if (along) pairs_in_rows(block, n, dp, along);
  if (across) pairs_of_rows(block, n, dp, across);
  return {along, dp / 2};
}

// Memory of a head in units of four bytes, handed out from the front.
struct Pieces {
  float* at;
  float* floats(std::int64_t n) { return std::exchange(at, at + n); }
  Pair* pairs(std::int64_t n) { return reinterpret_cast<Pair*>(floats(n)); }
};

inline void head_forward_bf16(const Head& head, Rows<const bf16> q, Rows<const bf16> k,
                              Rows<const bf16> v, const Prepare& pq, const Prepare& pk,
                              Rows<bf16> out, float* lse) {
  const std::int64_t nq = head.nq, nk = head.nk, d = head.d, kb = std::min(head.block, nk);
  const std::int64_t dp = padded(d), np = padded_stride(kb), qb = std::min(query_block, nq);
  const std::int64_t d2 = (d + 1) / 2, kb2 = (kb + 1) / 2, kept = head.several() ? nq : qb;
  const float factor = 1.0f / std::sqrt(static_cast<float>(d));
  Pieces memory{scratch<Scratch>(static_cast<std::size_t>(kb * dp + kb * dp / 2 + d2 * np +
                                                          kb2 * dp + 3 * qb * dp / 2 + kept * dp +
                                                          3 * qb * np / 2 + nq))};
  float* rows_f32 = memory.floats(kb * dp);
  Pair *keys = memory.pairs(kb * dp / 2), *keys_t = memory.pairs(d2 * np);
  Pair *values = memory.pairs(kb2 * dp), *queries = memory.pairs(qb * dp / 2);
  float *block = memory.floats(qb * dp), *scores = memory.floats(qb * np);
  Pair* p = memory.pairs(qb * np / 2);
  float *results = memory.floats(kept * dp), *sums = memory.floats(nq);
  for (std::int64_t key = 0; key < nk; key += kb) {
    const std::int64_t n = std::min(kb, nk - key), n2 = (n + 1) / 2;
    const bool last = key + n == nk;
    const PairRows key_rows = operand(k, key, n, d, pk, rows_f32, keys, nullptr);
    transpose(key_rows.at, key_rows.stride, n, d2, keys_t, np);
    operand(v, key, n, d, Prepare{}, rows_f32, nullptr, values);
    for (std::int64_t first = 0; first < nq; first += qb) {
      const std::int64_t rows = std::min(qb, nq - first);
      float* result = results + (head.several() ? first * dp : 0);
      const PairRows query = operand(q, first, rows, d, pq, block, queries, nullptr);
      small_gemm(rows, n, d2, query.at, query.stride, 1, keys_t, np, scores, np, false);
      if (last) add_to_last(scores, rows, n, np, head.last_bias / factor);
      softmax_rows<bf16>(
          scores, rows, n, np, factor, key == 0, lse + first, sums + first, result, dp,
          [&](std::int64_t r, std::int64_t i, vf e) { store_halves(p + (r * np + i) / 2, e); });
      small_gemm(rows, dp, n2, p, np / 2, 1, values, dp, result, dp, key > 0);
      if (last) finish_rows<bf16>(result, first, rows, d, lse + first, sums + first, out);
    }
  }
}

inline void head_backward_bf16(const Head& head, Rows<const bf16> q, Rows<const bf16> k,
                               Rows<const bf16> v, const Prepare& pq, const Prepare& pk,
                               Rows<const bf16> out, Rows<const bf16> dout, const float* lse,
                               Rows<bf16> dq, Rows<bf16> dk, Rows<bf16> dv, float* dwq,
                               float* dwk) {
  const std::int64_t nq = head.nq, nk = head.nk, d = head.d, kb = std::min(head.block, nk);
  const std::int64_t dp = padded(d), np = padded_stride(kb), qb = std::min(query_block, nq);
  const std::int64_t d2 = (d + 1) / 2, kb2 = (kb + 1) / 2, qb2 = (qb + 1) / 2;
  const bool several = head.several();
  const std::int64_t kept = several ? nq : qb;
  const float factor = 1.0f / std::sqrt(static_cast<float>(d));
  Pieces memory{scratch<Scratch>(static_cast<std::size_t>(
      2 * kb * dp + kb * dp / 2 + 2 * d2 * np + kb2 * dp + qb * dp + kept * dp + qb * dp +
      2 * qb2 * dp + 2 * qb * np + 2 * qb2 * np + qb * np / 2 + nq))};
  float *dkeys = memory.floats(kb * dp), *dvalues = memory.floats(kb * dp);
  Pair *in_rows = memory.pairs(kb * dp / 2), *keys_t = memory.pairs(d2 * np);
  Pair *values_t = memory.pairs(d2 * np), *keys = memory.pairs(kb2 * dp);
  float *block = memory.floats(qb * dp), *dqueries = memory.floats(kept * dp);
  Pair *queries = memory.pairs(qb * dp / 2), *queries_t = memory.pairs(qb2 * dp);
  Pair *dresult = memory.pairs(qb * dp / 2), *dresult_t = memory.pairs(qb2 * dp);
  float *scores = memory.floats(qb * np), *dscores = memory.floats(qb * np);
  Pair *p_t = memory.pairs(qb2 * np), *ds_t = memory.pairs(qb2 * np);
  Pair* ds = memory.pairs(qb * np / 2);
  float* deltas = memory.floats(nq);
  if (several) row_deltas<bf16>(nq, d, out, dout, deltas);
  for (std::int64_t key = 0; key < nk; key += kb) {
    const std::int64_t n = std::min(kb, nk - key), n2 = (n + 1) / 2;
    const bool last = key + n == nk;
    // dkeys holds the rows of values and keys until gradients take their place.
    const PairRows value_rows = operand(v, key, n, d, Prepare{}, dkeys, in_rows, nullptr);
    transpose(value_rows.at, value_rows.stride, n, d2, values_t, np);
    const PairRows key_rows = operand(k, key, n, d, pk, dkeys, in_rows, keys);
    transpose(key_rows.at, key_rows.stride, n, d2, keys_t, np);
    for (std::int64_t first = 0; first < nq; first += qb) {
      const std::int64_t rows = std::min(qb, nq - first), rows2 = (rows + 1) / 2;
      const bool later = first > 0;
      float* dquery = dqueries + (several ? first * dp : 0);
      const PairRows query = operand(q, first, rows, d, pq, block, queries, queries_t);
      small_gemm(rows, n, d2, query.at, query.stride, 1, keys_t, np, scores, np, false);
      const PairRows gradient = operand(dout, first, rows, d, Prepare{}, block, dresult, dresult_t);
      small_gemm(rows, n, d2, gradient.at, gradient.stride, 1, values_t, np, dscores, np, false);
      if (last) add_to_last(scores, rows, n, np, head.last_bias / factor);
      for (std::int64_t r = 0; r < rows; r += 2) {
        float delta[2] = {};
        const int two = r + 1 < rows ? 2 : 1;
        for (int j = 0; j < two; ++j) {
          const float sum = probabilities<bf16>(scores + (r + j) * np, dscores + (r + j) * np, n,
                                                lse[first + r + j], factor);
          delta[j] = several ? deltas[first + r + j] : sum;
        }
        for (std::int64_t i = 0; i < n; i += W) {
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
      small_gemm(n, dp, rows2, p_t, 1, np, dresult_t, dp, dvalues, dp, later);
      small_gemm(n, dp, rows2, ds_t, 1, np, queries_t, dp, dkeys, dp, later);
      small_gemm(rows, dp, n2, ds, np / 2, 1, keys, dp, dquery, dp, key > 0);
      if (last) unpack_gradient<bf16>(q, first, rows, d, pq, 1.0f, dquery, dq, dwq);
    }
    unpack_gradient<bf16>(k, key, n, d, pk, 1.0f, dkeys, dk, dwk);
    unpack_gradient<bf16>(v, key, n, d, Prepare{}, 1.0f, dvalues, dv, nullptr);
  }
}

#endif

// From so many keys on it pays to keep the operands in both orders. Whatever the queries are, so
// that the backward takes the same products.
constexpr std::int64_t worth_bf16 = 32;

// A head in the products that its type and the processor allow.
template <class T, class... Args>
void forward_of_head(const Head& head, const Args&... args) {
#ifdef __AVX512F__
  if constexpr (std::is_same_v<T, bf16>)
    if (head.nk >= worth_bf16 && cpu_multiplies_bf16()) return head_forward_bf16(head, args...);
#endif
  head_forward<T>(head, args...);
}
template <class T, class... Args>
void backward_of_head(const Head& head, const Args&... args) {
#ifdef __AVX512F__
  if constexpr (std::is_same_v<T, bf16>)
    if (head.nk >= worth_bf16 && cpu_multiplies_bf16()) return head_backward_bf16(head, args...);
#endif
  head_backward<T>(head, args...);
}
