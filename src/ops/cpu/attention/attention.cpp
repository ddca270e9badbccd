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
#include "ops/cpu/attention/head_bf16.h"

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
