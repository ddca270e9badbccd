// One head of one sequence, for attention.cpp: rows packed into scratch memory, products of f32.
// Included inside WEFT_CPU_BEGIN/END.

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

// q/k RMSNorm and rotary embedding of one projection; either may be absent.
struct Prepare {
  const float* weight = nullptr;  // [padded D]
  const float* cosine = nullptr;  // [positions, padded D], each value twice
  const float* sine = nullptr;    // the same with the sign of the even elements flipped
};

// The partner of each element within its interleaved pair.
vf swap_pairs(vf x) {
  vi index;
  for (int i = 0; i < W; ++i) index[i] = i ^ 1;
  return __builtin_shuffle(x, index);
}

template <class T>
float inverse_rms(const T* x, std::int64_t d) {
  vf squares{};
  for_vectors(d, [&](std::int64_t i, int n) {
    const vf v = load_n(x + i, n);
    squares += v * v;
  });
  return 1.0f / std::sqrt(hsum(squares) / static_cast<float>(d) + epsilon);
}

// to[i, 0..dp) = rope(norm(x_i)) * factor, zero beyond d.
template <class T>
void pack(Rows<const T> x, std::int64_t first, std::int64_t n, std::int64_t d, const Prepare& p,
          float factor, float* to) {
  const std::int64_t dp = padded(d);
  for (std::int64_t r = 0; r < n; ++r) {
    const T* in = x[first + r];
    float* out = to + r * dp;
    const float scale = p.weight ? factor * inverse_rms(in, d) : factor;
    const float* c = p.cosine ? p.cosine + (first + r) * dp : nullptr;
    const float* s = p.sine ? p.sine + (first + r) * dp : nullptr;
    for_vectors(d, [&](std::int64_t i, int m) {
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
  for (std::int64_t r = 0; r < n; ++r) {
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
    const float rstd = inverse_rms(in, d);
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

// Row-wise softmax numerators of factor * scores [rows, np], of which n columns count:
// inverse[r] = 1 / sum, lse[r] = max + log(sum).
void softmax_rows(float* scores, std::int64_t rows, std::int64_t n, std::int64_t np, float factor,
                  float* inverse, float* lse) {
  for (std::int64_t r = 0; r < rows; ++r) {
    float* s = scores + r * np;
    vf top = splat(-INFINITY);
    for_vectors(n, [&](std::int64_t i, int m) {
      const vf v = load(s + i);
      top = vmax(top, m == W ? v : select_first(v, m, -INFINITY));
    });
    const float max = hmax(top) * factor;
    vf sum{};
    for_vectors(n, [&](std::int64_t i, int m) {
      vf e = vexp(load(s + i) * factor - max);
      if (m < W) e = select_first(e, m, 0.0f);
      sum += e;
      store(s + i, e);
    });
    const float total = hsum(sum);
    inverse[r] = 1.0f / total;
    lse[r] = max + std::log(total);
  }
}

// A row of n scores, times `factor`, becomes probabilities, zero up to a whole vector, where
// `gradients` become zero too. Returns the softmax's correction, their sum of products: dout * out
// instead would bring in the rounding of out.
inline float probabilities(float* scores, float* gradients, std::int64_t n, float lse,
                           float factor) {
  vf dot{};
  for_vectors(n, [&](std::int64_t i, int m) {
    vf p = vexp(load(scores + i) * factor - lse), g = load(gradients + i);
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

struct Scratch;

template <class T>
void head_forward(std::int64_t nq, std::int64_t nk, std::int64_t d, Rows<const T> q,
                  Rows<const T> k, Rows<const T> v, const Prepare& pq, const Prepare& pk,
                  Rows<T> out, float* lse) {
  const std::int64_t dp = padded(d), np = padded_stride(nk), qb = std::min(query_block, nq);
  const float factor = 1.0f / std::sqrt(static_cast<float>(d));
  float* keys =
      scratch<Scratch>(static_cast<std::size_t>(2 * nk * dp + d * np + 2 * qb * dp + qb * np + qb));
  float *values = keys + nk * dp, *keys_t = values + nk * dp, *queries = keys_t + d * np;
  float *scores = queries + qb * dp, *result = scores + qb * np, *inverse = result + qb * dp;
  pack<T>(k, 0, nk, d, pk, 1.0f, keys);
  // Columns beyond nk hold whatever the scratch held: their products are never read.
  transpose(keys, dp, nk, d, keys_t, np);
  pack<T>(v, 0, nk, d, Prepare{}, 1.0f, values);
  for (std::int64_t first = 0; first < nq; first += qb) {
    const std::int64_t rows = std::min(qb, nq - first);
    pack<T>(q, first, rows, d, pq, factor, queries);
    small_gemm(rows, nk, d, queries, dp, 1, keys_t, np, scores, np, false);
    softmax_rows(scores, rows, nk, np, 1.0f, inverse, lse + first);
    small_gemm(rows, dp, nk, scores, np, 1, values, dp, result, dp, false);
    for (std::int64_t r = 0; r < rows; ++r) {
      T* to = out[first + r];
      for_vectors(d, [&](std::int64_t i, int m) {
        // Divided by the softmax's sum only now: d values a row instead of nk.
        store_n(to + i, load(result + r * dp + i) * inverse[r], m);
      });
    }
  }
}

template <class T>
void head_backward(std::int64_t nq, std::int64_t nk, std::int64_t d, Rows<const T> q,
                   Rows<const T> k, Rows<const T> v, const Prepare& pq, const Prepare& pk,
                   Rows<const T> dout, const float* lse, Rows<T> dq, Rows<T> dk, Rows<T> dv,
                   float* dwq, float* dwk) {
  const std::int64_t dp = padded(d), np = padded_stride(nk), qb = std::min(query_block, nq);
  const float factor = 1.0f / std::sqrt(static_cast<float>(d));
  float* keys = scratch<Scratch>(
      static_cast<std::size_t>(3 * nk * dp + 2 * d * np + 3 * qb * dp + 2 * qb * np));
  float *dkeys = keys + nk * dp, *dvalues = dkeys + nk * dp;
  float *keys_t = dvalues + nk * dp, *values_t = keys_t + d * np, *queries = values_t + d * np;
  float *dresult = queries + qb * dp, *dqueries = dresult + qb * dp;
  float *scores = dqueries + qb * dp, *dscores = scores + qb * np;
  // dvalues first holds the values themselves, until their transpose is made.
  pack<T>(v, 0, nk, d, Prepare{}, 1.0f, dvalues);
  pack<T>(k, 0, nk, d, pk, 1.0f, keys);
  transpose(dvalues, dp, nk, d, values_t, np);
  transpose(keys, dp, nk, d, keys_t, np);
  for (std::int64_t first = 0; first < nq; first += qb) {
    const std::int64_t rows = std::min(qb, nq - first);
    const bool later = first > 0;
    pack<T>(q, first, rows, d, pq, factor, queries);
    pack<T>(dout, first, rows, d, Prepare{}, 1.0f, dresult);
    small_gemm(rows, nk, d, queries, dp, 1, keys_t, np, scores, np, false);
    small_gemm(rows, nk, d, dresult, dp, 1, values_t, np, dscores, np, false);
    for (std::int64_t r = 0; r < rows; ++r) {
      float *s = scores + r * np, *ds = dscores + r * np;
      const float delta = probabilities(s, ds, nk, lse[first + r], 1.0f);
      for_vectors(
          nk, [&](std::int64_t i, int) { store(ds + i, load(s + i) * (load(ds + i) - delta)); });
    }
    small_gemm(nk, dp, rows, scores, 1, np, dresult, dp, dvalues, dp, later);
    small_gemm(nk, dp, rows, dscores, 1, np, queries, dp, dkeys, dp, later);
    small_gemm(rows, dp, nk, dscores, np, 1, keys, dp, dqueries, dp, false);
    unpack_gradient<T>(q, first, rows, d, pq, factor, dqueries, dq, dwq);
  }
  unpack_gradient<T>(k, 0, nk, d, pk, 1.0f, dkeys, dk, dwk);
  unpack_gradient<T>(v, 0, nk, d, Prepare{}, 1.0f, dvalues, dv, nullptr);
}
