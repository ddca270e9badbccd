// RMSNorm of queries and keys over all heads, with their rotation, of ops/norm.h on the GPU
// (rows.cuh). CPU twin: src/ops/cpu/norm.cpp; cases: tests/kernels/norm.cpp.
//
// Bound by memory. Least traffic for one token of 12 heads of 128 channels in bf16 (a row is 3072
// bytes; f32 twice that), and 512 bytes of the table:
//   rms_rope_forward    x in, y out          6656 bytes
//   rms_rope_backward   x, dy in, dx out     9728 bytes
// A sample's tokens are a frame of rows.cuh.
//
// Scratch (Tensor::empty) of the backward: 4 C bytes a run, 3.2 MB at C = 1536 on 132 SMs.
#include "ops/norm.h"

#include "norm/rows.cuh"

namespace weft::kernels {
namespace {

constexpr int rope_run = 8;  // tokens of a block: the weights are read once for them
constexpr int backward_blocks = 4;

// What turns the pairs of a token's channels. No rope: nothing does.
struct Turns {
  const float* rope;  // [tokens, width]
  int width;          // channels of a head

  __device__ const float* at(int token) const {
    return rope + static_cast<std::int64_t>(token) * width;
  }
};

// (cos, sin) of the two pairs of v, turned by them, or back (sign -1).
__device__ __forceinline__ void turn(const Quad<float>& angles, float sign, float (&v)[4]) {
#pragma unroll
  for (int e = 0; e < 4; e += 2) {
    const float c = angles.v[e], s = sign * angles.v[e + 1], a = v[e], b = v[e + 1];
    v[e] = a * c - b * s;
    v[e + 1] = a * s + b * c;
  }
}

// This thread's angles of a token: quad n of the row is quad at[n] of its head.
template <int N>
__device__ __forceinline__ void load_angles(const Turns& turns, int token, const int (&at)[N],
                                            Quad<float> (&angles)[N]) {
#pragma unroll
  for (int n = 0; n < N; ++n) angles[n] = load_vec<4>(turns.at(token), at[n]);
}
template <int N>
__device__ __forceinline__ void find_angles(const Turns& turns, int (&at)[N]) {
#pragma unroll
  for (int n = 0; n < N; ++n) at[n] = row_quad(n) % (turns.width / 4);
}

template <class T, int N, bool turned>
__global__ void __launch_bounds__(row_threads, 2)
    rms_rope_kernel(const T* __restrict__ x, const float* __restrict__ w, Turns turns, FrameGrid g,
                    float eps, T* __restrict__ y) {
  const int frame = g.frame(), last = g.last();
  BlockSums sums;
  Quad<float> weight[N], angles[N];
  load_quads(w, g.channels, weight);
  int at[N];
  if constexpr (turned) find_angles(turns, at);
  for (int token = g.first(); token < last; ++token) {
    const std::int64_t row = g.row(frame, token);
    Quad<T> in[N];
    load_quads(x + row, g.channels, in);
    if constexpr (turned) load_angles(turns, token, at, angles);
    float squares = 0.0f;
#pragma unroll
    for (int n = 0; n < N; ++n) {
      float v[4];
      unpack(in[n], v);
#pragma unroll
      for (int e = 0; e < 4; ++e) squares += v[e] * v[e];
    }
    const float r = rsqrtf(sums(squares) / static_cast<float>(g.channels) + eps);
#pragma unroll
    for (int n = 0; n < N; ++n) {
      if (row_quad(n) * 4 >= g.channels) continue;
      float v[4];
      unpack(in[n], v);
#pragma unroll
      for (int e = 0; e < 4; ++e) v[e] *= r * weight[n].v[e];
      if constexpr (turned) turn(angles[n], 1.0f, v);
      store_vec<4>(y + row, row_quad(n), pack<T, 4>(v));
    }
  }
}

// dx = r (g w - x r^2 mean(g w x)), dw += g x r, g = dy turned back. dx may be dy.
template <class T, int N, bool turned>
__global__ void __launch_bounds__(row_threads, 2)
    rms_rope_backward_kernel(const T* __restrict__ x, const float* __restrict__ w, Turns turns,
                             FrameGrid g, float eps, const T* dy, T* dx,
                             float* __restrict__ partial) {
  const int frame = g.frame(), last = g.last();
  BlockSums sums;
  Quad<float> weight[N], angles[N];
  load_quads(w, g.channels, weight);
  float dw[N][4] = {};
  int at[N];
  if constexpr (turned) find_angles(turns, at);
  for (int token = g.first(); token < last; ++token) {
    const std::int64_t row = g.row(frame, token);
    Quad<T> in[N], gradient[N];
    load_quads(x + row, g.channels, in);
    load_quads(dy + row, g.channels, gradient);
    if constexpr (turned) load_angles(turns, token, at, angles);
    float squares = 0.0f, product = 0.0f, d[N][4];
#pragma unroll
    for (int n = 0; n < N; ++n) {
      float v[4];
      unpack(in[n], v);
      unpack(gradient[n], d[n]);
      if constexpr (turned) turn(angles[n], -1.0f, d[n]);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        squares += v[e] * v[e];
        product += d[n][e] * weight[n].v[e] * v[e];
      }
    }
    const float2 both = sums(squares, product);
    const float r = rsqrtf(both.x / static_cast<float>(g.channels) + eps);
    const float along = both.y / static_cast<float>(g.channels) * r * r;
#pragma unroll
    for (int n = 0; n < N; ++n) {
      if (row_quad(n) * 4 >= g.channels) continue;
      float v[4];
      unpack(in[n], v);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        dw[n][e] += d[n][e] * (v[e] * r);
        v[e] = r * (d[n][e] * weight[n].v[e] - v[e] * along);
      }
      store_vec<4>(dx + row, row_quad(n), pack<T, 4>(v));
    }
  }
  store_sums(dw, g.channels, partial + static_cast<std::int64_t>(blockIdx.x) * g.channels);
}

// Any C: a block a token, a pair of channels a thread and step; the last one may be single.
struct Pair {
  float a, b;
};
template <class T>
__device__ __forceinline__ Pair load_pair(const T* row, int i, int channels) {
  return {to_float(row[i]), i + 1 < channels ? to_float(row[i + 1]) : 0.0f};
}
template <class T>
__device__ __forceinline__ void store_pair(T* row, int i, int channels, Pair p) {
  row[i] = from_float<T>(p.a);
  if (i + 1 < channels) row[i + 1] = from_float<T>(p.b);
}
__device__ __forceinline__ Pair turn(const Turns& turns, int token, int i, float sign, Pair p) {
  if (turns.rope == nullptr) return p;
  const float* angle = turns.at(token) + i % turns.width;
  const float c = angle[0], s = sign * angle[1];
  return {p.a * c - p.b * s, p.a * s + p.b * c};
}

template <class T>
__global__ void __launch_bounds__(threads)
    rms_rope_any_kernel(const T* __restrict__ x, const float* __restrict__ w, Turns turns,
                        FrameGrid g, float eps, T* __restrict__ y) {
  const int frame = g.frame(), C = g.channels;
  for (int token = g.first(); token < g.last(); ++token) {
    const T* in = x + g.row(frame, token);
    float squares = 0.0f;
    for (int i = threadIdx.x; i < C; i += threads) squares += to_float(in[i]) * to_float(in[i]);
    const float sum = block_sum(squares, shared_memory<float>());
    const float r = rsqrtf(sum / static_cast<float>(C) + eps);
    for (int i = 2 * static_cast<int>(threadIdx.x); i < C; i += 2 * threads) {
      const Pair v = load_pair(in, i, C), weight = load_pair(w, i, C);
      // The address is computed again, which saves a register in the loop.
      store_pair(y + g.row(frame, opaque(token)), i, C,
                 turn(turns, token, i, 1.0f, {v.a * r * weight.a, v.b * r * weight.b}));
    }
  }
}

template <class T>
__global__ void __launch_bounds__(threads)
    rms_rope_any_backward_kernel(const T* __restrict__ x, const float* __restrict__ w, Turns turns,
                                 FrameGrid g, float eps, const T* dy, T* dx,
                                 float* __restrict__ partial) {
  const int frame = g.frame(), C = g.channels, first = 2 * static_cast<int>(threadIdx.x);
  float *scratch = shared_memory<float>(), *dw = scratch + 32;
  for (int i = first; i < C; i += 2 * threads) store_pair(dw, i, C, {0.0f, 0.0f});
  for (int token = g.first(); token < g.last(); ++token) {
    const std::int64_t row = g.row(frame, token);
    float squares = 0.0f, product = 0.0f;
    for (int i = first; i < C; i += 2 * threads) {
      const Pair v = load_pair(x + row, i, C), weight = load_pair(w, i, C);
      const Pair d = turn(turns, token, i, -1.0f, load_pair(dy + row, i, C));
      squares += v.a * v.a + v.b * v.b;
      product += d.a * weight.a * v.a + d.b * weight.b * v.b;
    }
    const float r = rsqrtf(block_sum(squares, scratch) / static_cast<float>(C) + eps);
    const float along = block_sum(product, scratch) / static_cast<float>(C) * r * r;
    const std::int64_t again = g.row(frame, opaque(token));
    for (int i = first; i < C; i += 2 * threads) {
      const Pair v = load_pair(x + again, i, C), weight = load_pair(w, i, C),
                 sum = load_pair(dw, i, C);
      const Pair d = turn(turns, token, i, -1.0f, load_pair(dy + again, i, C));
      store_pair(dw, i, C, {sum.a + d.a * (v.a * r), sum.b + d.b * (v.b * r)});
      store_pair(dx + again, i, C,
                 {r * (d.a * weight.a - v.a * along), r * (d.b * weight.b - v.b * along)});
    }
  }
  for (int i = first; i < C; i += 2 * threads)
    store_pair(partial + static_cast<std::int64_t>(blockIdx.x) * C, i, C, load_pair(dw, i, C));
}

// The tokens of a sample are a frame; without a table all tokens are one sample's.
FrameGrid samples_of(const Tensor& x, const Tensor& rope) {
  const std::int64_t c = x.dim(-1), rows = x.numel() / c;
  const std::int64_t tokens = rope.defined() ? rope.dim(0) : rows;
  FrameGrid g{};
  g.channels = static_cast<int>(c);
  g.tokens = static_cast<int>(tokens);
  g.frames = tokens == 0 ? 0 : static_cast<int>(rows / tokens);
  return g;
}

Turns turns_of(const Tensor& rope, int channels, int heads) {
  return {data_or_null<float>(rope), channels / heads};
}

}  // namespace
}  // namespace weft::kernels

namespace weft::ops::cuda {

using namespace kernels;  // NOLINT: the operations are written in the kernels' words

void rms_rope_forward(const Tensor& x, const Tensor& w, const Tensor& rope, int heads, float eps,
                      Tensor& y) {
  const FrameGrid g = with_run(samples_of(x, rope), rope_run);
  const Turns turns = turns_of(rope, g.channels, heads);
  const bool turned = rope.defined();
  by_type(x, [&]<class T>() {
    const auto start = [&](auto kernel, int block, std::size_t shared) {
      launch(kernel, dim3(g.blocks()), dim3(block), shared, data<T>(x), data<float>(w), turns, g,
             eps, data<T>(y));
    };
    if (!in_rows(g.channels, x, w, y) || (turned && (turns.width % 4 != 0 || !aligned<4>(rope))))
      return start(rms_rope_any_kernel<T>, threads, 32 * sizeof(float));
    by_row(g.channels, [&]<int N>(int block) {
      if (turned)
        start(rms_rope_kernel<T, N, true>, block, BlockSums::bytes);
      else
        start(rms_rope_kernel<T, N, false>, block, BlockSums::bytes);
    });
  });
}

void rms_rope_backward(const Tensor& x, const Tensor& w, const Tensor& rope, int heads, float eps,
                       const Tensor& dy, Tensor& dx, Tensor& dw) {
  const FrameGrid g = with_even_runs(samples_of(x, rope), slots(backward_blocks));
  const Turns turns = turns_of(rope, g.channels, heads);
  const bool turned = rope.defined();
  const Tensor partial = Tensor::empty({g.frames, g.runs, g.channels}, DType::f32);
  by_type(x, [&]<class T>() {
    const auto start = [&](auto kernel, int block, std::size_t shared) {
      launch(kernel, dim3(g.blocks()), dim3(block), shared, data<T>(x), data<float>(w), turns, g,
             eps, data<T>(dy), data<T>(dx), data<float>(partial));
    };
    if (!in_rows(g.channels, x, w, dy, dx) ||
        (turned && (turns.width % 4 != 0 || !aligned<4>(rope))))
      return start(rms_rope_any_backward_kernel<T>, threads,
                   (32 + static_cast<std::size_t>(g.channels)) * sizeof(float));
    by_row(g.channels, [&]<int N>(int block) {
      if (turned)
        start(rms_rope_backward_kernel<T, N, true>, block, BlockSums::bytes);
      else
        start(rms_rope_backward_kernel<T, N, false>, block, BlockSums::bytes);
    });
  });
  if (dw.defined())
    add_columns(data<float>(partial), g.frames * g.runs, g.channels, g.channels, data<float>(dw));
}

}  // namespace weft::ops::cuda
