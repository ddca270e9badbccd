// CPU side of self, cross and plain attention of ops/attention.h: which heads there are, and who
// computes them (head.h). Work: forward 4 n^2 D, backward 10 n^2 D operations a head; activations
// of self and cross attention are read and written once.
#include "ops/attention.h"

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
#include "ops/cpu/attention/head.h"

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

// Where sequence `s` of head `h` lies in [B,T,S, parts*H*D] for either axis.
struct Layout {
  std::int64_t B, T, S, H, D, sequences, length;
  Axis axis;

  Layout(const Tensor& qkv, Axis a)
      : B(qkv.dim(0)), T(qkv.dim(1)), S(qkv.dim(2)), H(qkv.dim(4)), D(qkv.dim(5)), axis(a) {
    sequences = a == Axis::space ? B * T : B * S;
    length = a == Axis::space ? S : T;
  }
  Head head() const { return {length, length, D, length}; }
  template <class T_>
  Rows<T_> rows(T_* base, std::int64_t sequence, std::int64_t row_size, std::int64_t offset) const {
    if (axis == Axis::space) return {base + sequence * S * row_size + offset, row_size};
    return {base + (sequence / S * T * S + sequence % S) * row_size + offset, S * row_size};
  }
};

}  // namespace

void self_attention_forward(const Tensor& qkv, const Tensor& wq, const Tensor& wk,
                            const Tensor& rope, Axis axis, Tensor& out, Tensor& lse, Tensor&) {
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
      forward_of_head<T>(l.head(), l.rows(in, s, 3 * c, h * l.D), l.rows(in, s, 3 * c, c + h * l.D),
                         l.rows(in, s, 3 * c, 2 * c + h * l.D), tables.q, tables.k,
                         l.rows(to, s, c, h * l.D), ls + task * l.length);
    }
  });
}

void self_attention_backward(const Tensor& qkv, const Tensor& wq, const Tensor& wk,
                             const Tensor& rope, Axis axis, const Tensor& out, const Tensor& lse,
                             const Tensor& dout, Tensor& dqkv, Tensor& dwq, Tensor& dwk,
                             const Tensor&) {
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
    const T *in = qkv.data<T>(), *o = out.data<T>(), *g = dout.data<T>();
    T* d = dqkv.data<T>();
    const float* ls = lse.data<float>();
#pragma omp parallel for schedule(static)
    for (std::int64_t piece = 0; piece < pieces; ++piece) {
      float* dw = partials + piece * 2 * dp;
      for (std::int64_t task = tasks * piece / pieces; task < tasks * (piece + 1) / pieces;
           ++task) {
        const std::int64_t s = task / l.H, h = task % l.H, at = h * l.D;
        backward_of_head<T>(l.head(), l.rows(in, s, 3 * c, at), l.rows(in, s, 3 * c, c + at),
                            l.rows(in, s, 3 * c, 2 * c + at), tables.q, tables.k,
                            l.rows(o, s, c, at), l.rows(g, s, c, at), ls + task * l.length,
                            l.rows(d, s, 3 * c, at), l.rows(d, s, 3 * c, c + at),
                            l.rows(d, s, 3 * c, 2 * c + at),
                            weights ? dw : static_cast<float*>(nullptr),
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
      forward_of_head<T>(Head{n, keys, D, keys}, Rows<const T>{qs + (b * N + n0) * c + h * D, c},
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
    const T *qs = q.data<T>(), *kvs = kv.data<T>(), *os = out.data<T>(), *gs = dout.data<T>();
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
      backward_of_head<T>(Head{N, keys, D, keys}, Rows<const T>{qs + at, c},
                          Rows<const T>{kvs + kat, 2 * c}, Rows<const T>{kvs + kat + c, 2 * c},
                          Prepare{}, Prepare{}, Rows<const T>{os + at, c},
                          Rows<const T>{gs + at, c}, ls + task * N, Rows<T>{dqs + at, c},
                          Rows<T>{dkvs + kat, 2 * c}, Rows<T>{dkvs + kat + c, 2 * c},
                          static_cast<float*>(nullptr), static_cast<float*>(nullptr));
    }
  });
}

namespace {

// Keys at a time where they may be many: their packed rows, the block's scores and gradients stay
// in the second-level cache.
constexpr std::int64_t key_block = 256;
// Queries that a thread takes at a time: the keys are packed again for each.
constexpr std::int64_t query_piece = 16 * query_block;

// q [B,N,C] and keys [rows,C] of attention_forward: where head h of sample b lies.
struct Packed {
  std::int64_t B, N, C, D, rows;
  const std::int32_t* offsets;
  const float* bias;

  Packed(const Tensor& q, const Tensor& k, const Tensor& key_offsets, const Tensor& last_bias,
         int heads)
      : B(q.dim(0)),
        N(q.dim(1)),
        C(q.dim(2)),
        D(C / heads),
        rows(k.numel() / C),
        offsets(key_offsets.defined() ? key_offsets.data<std::int32_t>() : nullptr),
        bias(last_bias.defined() ? last_bias.data<float>() : nullptr) {}

  std::int64_t first_key(std::int64_t b) const { return offsets ? offsets[b] : rows / B * b; }
  Head head(std::int64_t b, std::int64_t queries) const {
    return {queries, first_key(b + 1) - first_key(b), D, key_block, bias ? bias[b] : 0.0f};
  }
  template <class T>
  Rows<T> queries(T* base, std::int64_t b, std::int64_t h, std::int64_t first = 0) const {
    return {base + (b * N + first) * C + h * D, C};
  }
  template <class T>
  Rows<T> keys(T* base, std::int64_t b, std::int64_t h) const {
    return {base + first_key(b) * C + h * D, C};
  }
};

template <class T>
void clear_rows(Rows<T> rows, std::int64_t n, std::int64_t d) {
  for (std::int64_t i = 0; i < n; ++i) std::fill_n(rows[i], d, T(0.0f));
}

}  // namespace

void attention_forward(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& offsets,
                       const Tensor& last_bias, int heads, Tensor& out, Tensor& lse) {
  const Packed p(q, k, offsets, last_bias, heads);
  const std::int64_t H = heads, pieces = (p.N + query_piece - 1) / query_piece;
  with_type(q.dtype(), [&](auto type) {
    using T = decltype(type);
    // Samples differ in keys: a free thread takes the next piece.
#pragma omp parallel for schedule(dynamic)
    for (std::int64_t task = 0; task < p.B * H * pieces; ++task) {
      const std::int64_t b = task / (H * pieces), h = task / pieces % H;
      const std::int64_t first = task % pieces * query_piece;
      const Head head = p.head(b, std::min(query_piece, p.N - first));
      const Rows<T> to = p.queries(out.data<T>(), b, h, first);
      float* l = lse.data<float>() + (b * H + h) * p.N + first;
      if (head.nk == 0) {
        clear_rows(to, head.nq, p.D);
        std::fill_n(l, head.nq, 0.0f);
        continue;
      }
      forward_of_head<T>(head, p.queries<const T>(q.data<T>(), b, h, first),
                         p.keys<const T>(k.data<T>(), b, h), p.keys<const T>(v.data<T>(), b, h),
                         Prepare{}, Prepare{}, to, l);
    }
  });
}

void attention_backward(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& offsets,
                        const Tensor& last_bias, int heads, const Tensor& out, const Tensor& lse,
                        const Tensor& dout, Tensor& dq, Tensor& dk, Tensor& dv) {
  const Packed p(q, k, offsets, last_bias, heads);
  const std::int64_t H = heads;
  with_type(q.dtype(), [&](auto type) {
    using T = decltype(type);
    for (Tensor* t : {&dk, &dv})  // the padding behind the last sample's keys
      std::fill(t->data<T>() + p.first_key(p.B) * p.C, t->data<T>() + p.rows * p.C, T(0.0f));
      // One task sums all of a head's dk and dv, in one order.
#pragma omp parallel for schedule(dynamic)
    for (std::int64_t task = 0; task < p.B * H; ++task) {
      const std::int64_t b = task / H, h = task % H;
      const Head head = p.head(b, p.N);
      const Rows<T> to = p.queries(dq.data<T>(), b, h);
      if (head.nk == 0) {
        clear_rows(to, head.nq, p.D);
        continue;
      }
      backward_of_head<T>(head, p.queries<const T>(q.data<T>(), b, h),
                          p.keys<const T>(k.data<T>(), b, h), p.keys<const T>(v.data<T>(), b, h),
                          Prepare{}, Prepare{}, p.queries<const T>(out.data<T>(), b, h),
                          p.queries<const T>(dout.data<T>(), b, h), lse.data<float>() + task * p.N,
                          to, p.keys(dk.data<T>(), b, h), p.keys(dv.data<T>(), b, h),
                          static_cast<float*>(nullptr), static_cast<float*>(nullptr));
    }
  });
}

WEFT_CPU_END
