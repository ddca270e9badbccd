// CPU side of relative_attention_forward. One head of one caption at a time, as in attention.cpp:
// the keys are transposed into scratch memory once, scores of a block of queries stay in the cache,
// and the products are the register tiles of gemm_tile.h. Work: 4 n^2 D operations a head. The bias
// depends on the head and on key - query alone, so that the bias of a row of scores is a piece of
// one line of 2 n - 1 numbers.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <memory>

#include "ops/attention.h"

WEFT_CPU_BEGIN
namespace {
#include "ops/cpu/gemm_tile.h"

constexpr std::int64_t query_block = 96;

struct Scratch;

std::int64_t padded(std::int64_t n) { return (n + W - 1) / W * W; }

// Rows of D elements, `stride` apart, as floats `ld` apart with zeros behind D: themselves where
// they are that already.
struct Packed {
  const float* rows;
  std::int64_t ld;
};
template <class T>
Packed pack(const T* x, std::int64_t stride, std::int64_t n, std::int64_t d, float* to) {
  if constexpr (std::is_same_v<T, float>)
    if (d % W == 0) return {x, stride};
  const std::int64_t dp = padded(d);
  for (std::int64_t r = 0; r < n; ++r)
    for_vectors(
        d, [&](std::int64_t i, int m) { store(to + r * dp + i, load_n(x + r * stride + i, m)); });
  return {to, dp};
}

// scores [rows, np] of queries first ... first + rows -> softmax numerators; inverse[r] = 1 / sum.
// `bias` is the line of this head, zero distance at its middle `zero`.
void softmax_rows(float* scores, std::int64_t first, std::int64_t rows, std::int64_t n,
                  std::int64_t np, const float* zero, float* inverse) {
  for (std::int64_t r = 0; r < rows; ++r) {
    float* s = scores + r * np;
    const float* b = zero - (first + r);
    vf top = splat(-INFINITY);
    for_vectors(n, [&](std::int64_t i, int m) {
      const vf v = load(s + i) + load_n(b + i, m);
      store(s + i, v);
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
    inverse[r] = 1.0f / hsum(sum);
  }
}

// q, k, v: the head's rows of one caption, `stride` apart; out likewise.
template <class T>
void head_forward(std::int64_t n, std::int64_t d, const T* q, const T* k, const T* v,
                  std::int64_t stride, const float* zero, T* out) {
  const std::int64_t dp = padded(d), np = padded_stride(n), qb = std::min(query_block, n);
  float* keys_t =
      scratch<Scratch>(static_cast<std::size_t>(d * np + 2 * n * dp + 2 * qb * dp + qb * np + qb));
  float *room_k = keys_t + d * np, *room_v = room_k + n * dp, *room_q = room_v + n * dp;
  float *result = room_q + qb * dp, *scores = result + qb * dp, *inverse = scores + qb * np;
  const Packed keys = pack(k, stride, n, d, room_k), values = pack(v, stride, n, d, room_v);
  // Columns beyond n hold whatever the scratch held: their products are never read.
  transpose(keys.rows, keys.ld, n, d, keys_t, np);
  for (std::int64_t first = 0; first < n; first += qb) {
    const std::int64_t rows = std::min(qb, n - first);
    const Packed queries = pack(q + first * stride, stride, rows, d, room_q);
    small_gemm(rows, n, d, queries.rows, queries.ld, 1, keys_t, np, scores, np, false);
    softmax_rows(scores, first, rows, n, np, zero, inverse);
    small_gemm(rows, dp, n, scores, np, 1, values.rows, values.ld, result, dp, false);
    for (std::int64_t r = 0; r < rows; ++r)
      for_vectors(d, [&](std::int64_t i, int m) {
        store_n(out + (first + r) * stride + i, load(result + r * dp + i) * inverse[r], m);
      });
  }
}

}  // namespace

void relative_attention_forward(const Tensor& qkv, const Tensor& bias, const Tensor& offsets,
                                std::int64_t longest, Tensor& out) {
  const std::int64_t M = qkv.dim(1), H = qkv.dim(2), D = qkv.dim(3), B = offsets.numel() - 1;
  const std::int32_t* first = offsets.data<std::int32_t>();
  struct Lines;
  const std::int64_t line = 2 * longest - 1;
  float* lines = scratch<Lines>(static_cast<std::size_t>(H * line));
  for (std::int64_t i = 0; i < line; ++i) {
    const float* row = bias.data<float>() + relative_bucket(static_cast<int>(i - longest + 1)) * H;
    for (std::int64_t h = 0; h < H; ++h) lines[h * line + i] = row[h];
  }
  with_type(qkv.dtype(), [&](auto type) {
    using T = decltype(type);
    const T* q = qkv.data<T>();
    T* to = out.data<T>();
    // Captions differ in length: a free thread takes the next head.
#pragma omp parallel for schedule(dynamic)
    for (std::int64_t task = 0; task < B * H; ++task) {
      const std::int64_t b = task / H, h = task % H, at = (first[b] * H + h) * D;
      const std::int64_t n = first[b + 1] - first[b];
      if (n > 0)
        head_forward<T>(n, D, q + at, q + M * H * D + at, q + 2 * M * H * D + at, H * D,
                        lines + h * line + longest - 1, to + at);
    }
  });
}

WEFT_CPU_END
