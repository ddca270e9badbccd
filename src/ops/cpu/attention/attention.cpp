// CPU side of ops/attention.h. One head of one sequence at a time: q, k and v rows are normalised,
// rotated and packed into scratch memory once, scores of a block of queries stay in the cache, and
// the products are the register tiles of gemm_tile.h. Work: forward 4 n^2 D, backward 10 n^2 D
// operations a head; activations are read and written once.
#include "ops/attention.h"

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

WEFT_CPU_BEGIN
namespace {
#include "ops/cpu/gemm_tile.h"

// One head of one sequence: rows packed into scratch memory, products of f32.

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

// The operations.

// Pieces that the heads are cut into, each summing its own dwq, dwk: fixed, so that sums do not
// depend on threads.
constexpr std::int64_t max_pieces = 256;

// Padded copies of the q/k norm weights and of the rotary table, made once a call.
struct Tables {
  std::vector<float> data;
  Prepare q, k;

  Tables(const Tensor& wq, const Tensor& wk, const Tensor& rope, std::int64_t d,
         std::int64_t positions) {
    const std::int64_t dp = padded(d);
    data.assign(dp * (2 + 2 * positions), 0.0f);
    float* at = data.data();
    if (wq.defined()) {
      std::copy_n(wq.data<float>(), d, at);
      std::copy_n(wk.data<float>(), d, at + dp);
      q.weight = at;
      k.weight = at + dp;
    }
    if (rope.defined()) {
      float *c = at + 2 * dp, *s = c + positions * dp;
      const float* table = rope.data<float>();
      for (std::int64_t p = 0; p < positions; ++p)
        for (std::int64_t i = 0; i < d / 2; ++i) {
          const float cs = table[(p * (d / 2) + i) * 2], sn = table[(p * (d / 2) + i) * 2 + 1];
          c[p * dp + 2 * i] = c[p * dp + 2 * i + 1] = cs;
          s[p * dp + 2 * i] = -sn;
          s[p * dp + 2 * i + 1] = sn;
        }
      q.cosine = k.cosine = c;
      q.sine = k.sine = s;
    }
  }
};

// From so many keys on it pays to keep the operands in both orders. Whatever the queries are, so
// that the backward takes the same products.
constexpr std::int64_t worth_bf16 = 32;

// A head in the products that its type and the processor allow.
template <class T, class... Args>
void forward_of_head(std::int64_t nq, std::int64_t nk, const Args&... args) {
#ifdef __AVX512F__
  if constexpr (std::is_same_v<T, bf16>)
    if (nk >= worth_bf16 && cpu_multiplies_bf16()) return head_forward_bf16(nq, nk, args...);
#endif
  head_forward<T>(nq, nk, args...);
}
template <class T, class... Args>
void backward_of_head(std::int64_t nq, std::int64_t nk, const Args&... args) {
#ifdef __AVX512F__
  if constexpr (std::is_same_v<T, bf16>)
    if (nk >= worth_bf16 && cpu_multiplies_bf16()) return head_backward_bf16(nq, nk, args...);
#endif
  head_backward<T>(nq, nk, args...);
}

// Where sequence `s` of head `h` lies in [B,T,S, parts*H*D] for either axis.
struct Layout {
  std::int64_t B, T, S, H, D, sequences, length;
  Axis axis;

  Layout(const Tensor& qkv, Axis a)
      : B(qkv.dim(0)), T(qkv.dim(1)), S(qkv.dim(2)), H(qkv.dim(4)), D(qkv.dim(5)), axis(a) {
    sequences = a == Axis::space ? B * T : B * S;
    length = a == Axis::space ? S : T;
  }
  template <class T_>
  Rows<T_> rows(T_* base, std::int64_t sequence, std::int64_t row_size, std::int64_t offset) const {
    if (axis == Axis::space) return {base + sequence * S * row_size + offset, row_size};
    return {base + (sequence / S * T * S + sequence % S) * row_size + offset, S * row_size};
  }
};

}  // namespace

void self_attention_forward(const Tensor& qkv, const Tensor& wq, const Tensor& wk,
                            const Tensor& rope, Axis axis, Tensor& out, Tensor& lse) {
  const Layout l(qkv, axis);
  const Tables tables(wq, wk, rope, l.D, rope.defined() ? l.length : 0);
  const std::int64_t c = l.H * l.D;
  with_type(qkv.dtype(), [&](auto type) {
    using T = decltype(type);
    const T* in = qkv.data<T>();
    T* to = out.data<T>();
    float* ls = lse.data<float>();
#pragma omp parallel for schedule(static)
    for (std::int64_t task = 0; task < l.sequences * l.H; ++task) {
      const std::int64_t s = task / l.H, h = task % l.H;
      forward_of_head<T>(l.length, l.length, l.D, l.rows(in, s, 3 * c, h * l.D),
                         l.rows(in, s, 3 * c, c + h * l.D), l.rows(in, s, 3 * c, 2 * c + h * l.D),
                         tables.q, tables.k, l.rows(to, s, c, h * l.D), ls + task * l.length);
    }
  });
}

void self_attention_backward(const Tensor& qkv, const Tensor& wq, const Tensor& wk,
                             const Tensor& rope, Axis axis, const Tensor& out, const Tensor& lse,
                             const Tensor& dout, Tensor& dqkv, Tensor& dwq, Tensor& dwk) {
  const Layout l(qkv, axis);
  const Tables tables(wq, wk, rope, l.D, rope.defined() ? l.length : 0);
  const std::int64_t c = l.H * l.D, dp = padded(l.D);
  const std::int64_t tasks = l.sequences * l.H, pieces = std::min(tasks, max_pieces);
  struct Partials;
  float* partials = scratch<Partials>(static_cast<std::size_t>(pieces * 2 * dp));
  std::fill_n(partials, pieces * 2 * dp, 0.0f);
  const bool weights = dwq.defined();
  with_type(qkv.dtype(), [&](auto type) {
    using T = decltype(type);
    const T *in = qkv.data<T>(), *g = dout.data<T>();
    T* d = dqkv.data<T>();
    const float* ls = lse.data<float>();
#pragma omp parallel for schedule(static)
    for (std::int64_t piece = 0; piece < pieces; ++piece) {
      float* dw = partials + piece * 2 * dp;
      for (std::int64_t task = tasks * piece / pieces; task < tasks * (piece + 1) / pieces;
           ++task) {
        const std::int64_t s = task / l.H, h = task % l.H, at = h * l.D;
        backward_of_head<T>(
            l.length, l.length, l.D, l.rows(in, s, 3 * c, at), l.rows(in, s, 3 * c, c + at),
            l.rows(in, s, 3 * c, 2 * c + at), tables.q, tables.k, l.rows(g, s, c, at),
            ls + task * l.length, l.rows(d, s, 3 * c, at), l.rows(d, s, 3 * c, c + at),
            l.rows(d, s, 3 * c, 2 * c + at), weights ? dw : static_cast<float*>(nullptr),
            weights ? dw + dp : static_cast<float*>(nullptr));
      }
    }
  });
  if (!weights) return;
  for (std::int64_t piece = 0; piece < pieces; ++piece)
    for (std::int64_t i = 0; i < l.D; ++i) {
      // Pieces are added in their order, whichever threads made them.
      dwq.data<float>()[i] += partials[piece * 2 * dp + i];
      dwk.data<float>()[i] += partials[piece * 2 * dp + dp + i];
    }
}

void cross_attention_forward(const Tensor& q, const Tensor& kv, const Tensor& offsets, int heads,
                             Tensor& out, Tensor& lse) {
  const std::int64_t B = q.dim(0), N = q.dim(1), c = q.dim(2), H = heads, D = c / H;
  const std::int32_t* first = offsets.data<std::int32_t>();
  // Queries of one head in pieces, so that few heads still fill many threads.
  const std::int64_t piece = 512, pieces = (N + piece - 1) / piece;
  with_type(q.dtype(), [&](auto type) {
    using T = decltype(type);
    const T *qs = q.data<T>(), *kvs = kv.data<T>();
    T* to = out.data<T>();
    float* ls = lse.data<float>();
#pragma omp parallel for schedule(static)
    for (std::int64_t task = 0; task < B * H * pieces; ++task) {
      const std::int64_t b = task / (H * pieces), h = task / pieces % H, n0 = task % pieces * piece;
      const std::int64_t n = std::min(piece, N - n0), keys = first[b + 1] - first[b];
      const Rows<T> o{to + (b * N + n0) * c + h * D, c};
      float* l = ls + (b * H + h) * N + n0;
      if (keys == 0) {
        for (std::int64_t i = 0; i < n; ++i) std::fill_n(o[i], D, T(0.0f));
        std::fill_n(l, n, 0.0f);
        continue;
      }
      const T* kb = kvs + first[b] * 2 * c + h * D;
      forward_of_head<T>(n, keys, D, Rows<const T>{qs + (b * N + n0) * c + h * D, c},
                         Rows<const T>{kb, 2 * c}, Rows<const T>{kb + c, 2 * c}, Prepare{},
                         Prepare{}, o, l);
    }
  });
}

void cross_attention_backward(const Tensor& q, const Tensor& kv, const Tensor& offsets, int heads,
                              const Tensor& out, const Tensor& lse, const Tensor& dout, Tensor& dq,
                              Tensor& dkv) {
  const std::int64_t B = q.dim(0), N = q.dim(1), c = q.dim(2), H = heads, D = c / H;
  const std::int32_t* first = offsets.data<std::int32_t>();
  with_type(q.dtype(), [&](auto type) {
    using T = decltype(type);
    const T *qs = q.data<T>(), *kvs = kv.data<T>(), *gs = dout.data<T>();
    T *dqs = dq.data<T>(), *dkvs = dkv.data<T>();
    const float* ls = lse.data<float>();
    std::fill(dkvs + first[B] * 2 * c, dkvs + dkv.numel(), T(0.0f));
#pragma omp parallel for schedule(static)
    // Queries are not cut into pieces here: one task sums all of a head's dk and dv, in one order.
    for (std::int64_t task = 0; task < B * H; ++task) {
      const std::int64_t b = task / H, h = task % H, at = b * N * c + h * D;
      const std::int64_t keys = first[b + 1] - first[b], kat = first[b] * 2 * c + h * D;
      if (keys == 0) {
        for (std::int64_t i = 0; i < N; ++i) std::fill_n(dqs + at + i * c, D, T(0.0f));
        continue;
      }
      backward_of_head<T>(N, keys, D, Rows<const T>{qs + at, c}, Rows<const T>{kvs + kat, 2 * c},
                          Rows<const T>{kvs + kat + c, 2 * c}, Prepare{}, Prepare{},
                          Rows<const T>{gs + at, c}, ls + task * N, Rows<T>{dqs + at, c},
                          Rows<T>{dkvs + kat, 2 * c}, Rows<T>{dkvs + kat + c, 2 * c},
                          static_cast<float*>(nullptr), static_cast<float*>(nullptr));
    }
  });
}

WEFT_CPU_END
