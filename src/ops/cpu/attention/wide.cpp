// CPU side of wide_attention of ops/attention.h. A head of hundreds of channels makes the products
// large: they go through sgemm, a tile of queries against all keys at a time, each thread on
// products of its own (sgemm's own threads wait for each other at every call). What a thread takes
// is cut by the sizes alone, so that the sums do not depend on the threads. f32 reads q, k and v
// where they lie; bf16 is converted a frame at a time. sgemm must not be interrupted by a signal
// handler (train/stop.cpp).
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <dnnl.hpp>
#include <memory>

#include "core/error.h"
#include "ops/attention.h"

WEFT_CPU_BEGIN
namespace {
#include "ops/cpu/simd.h"

constexpr std::int64_t query_tile = 128;  // forward: of a thread; backward: parts of a tile
constexpr std::int64_t parts = 4, key_tile = 256;

// C [m,n] (+)= alpha op(A) op(B), rows of the given strides.
void product(bool at, bool bt, std::int64_t m, std::int64_t n, std::int64_t k, float alpha,
             const float* a, std::int64_t lda, const float* b, std::int64_t ldb, float beta,
             float* c, std::int64_t ldc) {
  const auto status =
      dnnl_sgemm(at ? 'T' : 'N', bt ? 'T' : 'N', m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
  WEFT_ASSERT(status == dnnl_success);
}

// `rows` rows of `c` values, of T or f32, from or to f32 rows.
template <class From, class To>
void convert(const From* from, std::int64_t n, To* to) {
#pragma omp parallel for schedule(static)
  for (std::int64_t i = 0; i < n; i += 4096)
    for_vectors(std::min<std::int64_t>(4096, n - i), [&](std::int64_t at, int width) {
      store_n(to + i + at, load_n(from + i + at, width), width);
    });
}

// A piece of a tensor in f32: itself, or a converted copy.
template <class Tag, class T>
const float* read(const T* x, std::int64_t n) {
  if constexpr (std::is_same_v<T, float>) {
    return x;
  } else {
    float* to = scratch<Tag>(static_cast<std::size_t>(n));
    convert(x, n, to);
    return to;
  }
}
template <class Tag, class T>
float* write(T* x, std::int64_t n) {
  if constexpr (std::is_same_v<T, float>)
    return x;
  else
    return scratch<Tag>(static_cast<std::size_t>(n));
}
template <class T>
void store_back(const float* from, std::int64_t n, T* to) {
  if constexpr (!std::is_same_v<T, float>) convert(from, n, to);
}

// One query: s, its scores, become probabilities; ds, gradients of those, become gradients of the
// scores times `factor`.
void softmax_gradient(const float* out, const float* dout, std::int64_t C, float lse, float factor,
                      std::int64_t P, float* s, float* ds) {
  vf dots{};
  for_vectors(C, [&](std::int64_t i, int n) { dots += load_n(dout + i, n) * load_n(out + i, n); });
  const float dot = hsum(dots);
  for_vectors(P, [&](std::int64_t i, int n) {
    const vf p = vexp(load_n(s + i, n) - lse);
    store_n(s + i, p, n);
    store_n(ds + i, p * (load_n(ds + i, n) - dot) * factor, n);
  });
}

struct Scores;
struct Gradients;
struct Qkv;
struct Out;
struct Dout;
struct Dqkv;

}  // namespace

void wide_attention_forward(const Tensor& qkv, Tensor& out, Tensor& lse) {
  const std::int64_t N = qkv.dim(0), P = qkv.dim(1), C = qkv.dim(-1);
  const float factor = 1.0f / std::sqrt(static_cast<float>(C));
  with_type(qkv.dtype(), [&](auto type) {
    using T = decltype(type);
    for (std::int64_t f = 0; f < N; ++f) {
      const float* in = read<Qkv>(qkv.data<T>() + f * P * 3 * C, P * 3 * C);
      float* o = write<Out>(out.data<T>() + f * P * C, P * C);
#pragma omp parallel for schedule(dynamic, 1)
      for (std::int64_t first = 0; first < P; first += query_tile) {
        const std::int64_t rows = std::min(query_tile, P - first);
        float* scores = scratch<Scores>(static_cast<std::size_t>(query_tile * P));
        product(false, true, rows, P, C, factor, in + first * 3 * C, 3 * C, in + C, 3 * C, 0.0f,
                scores, P);
        for (std::int64_t r = 0; r < rows; ++r) {
          float* row = scores + r * P;
          vf top = splat(-3.0e38f);
          for_vectors(P, [&](std::int64_t i, int n) {
            top = vmax(top, select_first(load_n(row + i, n), n, -3.0e38f));
          });
          const float largest = hmax(top);
          vf sums{};
          for_vectors(P, [&](std::int64_t i, int n) {
            const vf e = select_first(vexp(load_n(row + i, n) - largest), n, 0.0f);
            sums += e;
            store_n(row + i, e, n);
          });
          const float sum = hsum(sums), inverse = 1.0f / sum;
          for_vectors(
              P, [&](std::int64_t i, int n) { store_n(row + i, load_n(row + i, n) * inverse, n); });
          lse.data<float>()[f * P + first + r] = largest + std::log(sum);
        }
        product(false, false, rows, C, P, 1.0f, scores, P, in + 2 * C, 3 * C, 0.0f, o + first * C,
                C);
      }
      store_back(o, P * C, out.data<T>() + f * P * C);
    }
  });
}

void wide_attention_backward(const Tensor& qkv, const Tensor& out, const Tensor& lse,
                             const Tensor& dout, Tensor& dqkv) {
  const std::int64_t N = qkv.dim(0), P = qkv.dim(1), C = qkv.dim(-1);
  const float factor = 1.0f / std::sqrt(static_cast<float>(C));
  with_type(qkv.dtype(), [&](auto type) {
    using T = decltype(type);
    for (std::int64_t f = 0; f < N; ++f) {
      const float* in = read<Qkv>(qkv.data<T>() + f * P * 3 * C, P * 3 * C);
      const float* o = read<Out>(out.data<T>() + f * P * C, P * C);
      const float* dout32 = read<Dout>(dout.data<T>() + f * P * C, P * C);
      float* d = write<Dqkv>(dqkv.data<T>() + f * P * 3 * C, P * 3 * C);
      const std::int64_t tile = std::min(P, parts * query_tile);
      float* scores = scratch<Scores>(static_cast<std::size_t>(tile * P));
      float* gradients = scratch<Gradients>(static_cast<std::size_t>(tile * P));
#pragma omp parallel
      for (std::int64_t first = 0; first < P; first += tile) {
        const std::int64_t rows = std::min(tile, P - first);
        const float *q = in + first * 3 * C, *g = dout32 + first * C;
        // scores become probabilities, gradients those of the scores.
#pragma omp for schedule(dynamic, 1)
        for (std::int64_t from = 0; from < rows; from += query_tile) {
          const std::int64_t n = std::min(query_tile, rows - from);
          float *s = scores + from * P, *ds = gradients + from * P;
          product(false, true, n, P, C, factor, q + from * 3 * C, 3 * C, in + C, 3 * C, 0.0f, s, P);
          product(false, true, n, P, C, 1.0f, g + from * C, C, in + 2 * C, 3 * C, 0.0f, ds, P);
          for (std::int64_t r = 0; r < n; ++r) {
            const std::int64_t row = first + from + r;
            softmax_gradient(o + row * C, dout32 + row * C, C, lse.data<float>()[f * P + row],
                             factor, P, s + r * P, ds + r * P);
          }
          product(false, false, n, C, P, 1.0f, ds, P, in + C, 3 * C, 0.0f,
                  d + (first + from) * 3 * C, 3 * C);
        }
        const float more = first > 0 ? 1.0f : 0.0f;
#pragma omp for schedule(dynamic, 1)
        for (std::int64_t k = 0; k < P; k += key_tile) {
          const std::int64_t n = std::min(key_tile, P - k);
          float* to = d + k * 3 * C;
          product(true, false, n, C, rows, 1.0f, scores + k, P, g, C, more, to + 2 * C, 3 * C);
          product(true, false, n, C, rows, 1.0f, gradients + k, P, q, 3 * C, more, to + C, 3 * C);
        }
      }
      store_back(d, P * 3 * C, dqkv.data<T>() + f * P * 3 * C);
    }
  });
}

WEFT_CPU_END
