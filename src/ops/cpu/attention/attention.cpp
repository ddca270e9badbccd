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
#include <vector>

WEFT_CPU_BEGIN
namespace {
#include "ops/cpu/gemm_tile.h"

constexpr float epsilon = 1e-6f;
constexpr std::int64_t query_block = 96;
// Pieces that the heads are cut into, each summing its own dwq, dwk: fixed, so that sums do not
// depend on threads.
constexpr std::int64_t max_pieces = 256;

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

// Row-wise softmax numerators of scores [rows, np], of which n columns count:
// inverse[r] = 1 / sum, lse[r] = max + log(sum).
void softmax_rows(float* scores, std::int64_t rows, std::int64_t n, std::int64_t np, float* inverse,
                  float* lse) {
  for (std::int64_t r = 0; r < rows; ++r) {
    float* s = scores + r * np;
    vf top = splat(-INFINITY);
    for_vectors(n, [&](std::int64_t i, int m) {
      const vf v = load(s + i);
      top = vmax(top, m == W ? v : select_first(v, m, -INFINITY));
    });
    const float max = hmax(top);
    vf sum{};
    for_vectors(n, [&](std::int64_t i, int m) {
      vf e = vexp(load(s + i) - max);
      if (m < W) e = select_first(e, m, 0.0f);
      sum += e;
      store(s + i, e);
    });
    const float total = hsum(sum);
    inverse[r] = 1.0f / total;
    lse[r] = max + std::log(total);
  }
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
    softmax_rows(scores, rows, nk, np, inverse, lse + first);
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
      // The softmax's correction, sum of p dp, from the row at hand: dout * out would bring in the
      // rounding of out.
      const float l = lse[first + r];
      float *s = scores + r * np, *ds = dscores + r * np;
      vf dot{};
      for_vectors(nk, [&](std::int64_t i, int m) {
        vf p = vexp(load(s + i) - l), g = load(ds + i);
        if (m < W) {  // beyond the row's end the scratch is not written
          p = select_first(p, m, 0.0f);
          g = select_first(g, m, 0.0f);
        }
        store(s + i, p);
        dot += p * g;
      });
      const float delta = hsum(dot);
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

// Padded copies of the q/k norm weights and of the rotary table, made once a call.
struct Tables {
  std::vector<float> data;
  Prepare q, k;

  Tables(const Tensor& wq, const Tensor& wk, const Tensor& rope, std::int64_t d,
         std::int64_t positions) {
    const std::int64_t dp = padded(d);
    data.assign(static_cast<std::size_t>(dp * (2 + 2 * positions)), 0.0f);
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
      head_forward<T>(l.length, l.length, l.D, l.rows(in, s, 3 * c, h * l.D),
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
        head_backward<T>(
            l.length, l.length, l.D, l.rows(in, s, 3 * c, at), l.rows(in, s, 3 * c, c + at),
            l.rows(in, s, 3 * c, 2 * c + at), tables.q, tables.k, l.rows(g, s, c, at),
            ls + task * l.length, l.rows(d, s, 3 * c, at), l.rows(d, s, 3 * c, c + at),
            l.rows(d, s, 3 * c, 2 * c + at), weights ? dw : nullptr, weights ? dw + dp : nullptr);
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
      head_forward<T>(n, keys, D, {qs + (b * N + n0) * c + h * D, c}, {kb, 2 * c}, {kb + c, 2 * c},
                      Prepare{}, Prepare{}, o, l);
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
      head_backward<T>(N, keys, D, {qs + at, c}, {kvs + kat, 2 * c}, {kvs + kat + c, 2 * c},
                       Prepare{}, Prepare{}, {gs + at, c}, ls + task * N, {dqs + at, c},
                       {dkvs + kat, 2 * c}, {dkvs + kat + c, 2 * c}, nullptr, nullptr);
    }
  });
}

WEFT_CPU_END
