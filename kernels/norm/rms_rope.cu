// RMSNorm of ops/norm.h on the GPU, T5's and that of queries and keys over all heads, with their
// rotation (rows.cuh). CPU twin: src/ops/cpu/norm.cpp; cases: tests/kernels/norm.cpp.
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
__global__ void __launch_bounds__(row_threads, 1)
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
__global__ void __launch_bounds__(row_threads, 1)
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
  WEFT_ASSERT(!rope.defined() || channels / heads % 4 == 0);
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
    by_row(g.channels, [&]<int N>(int block) {
      launch(turned ? rms_rope_kernel<T, N, true> : rms_rope_kernel<T, N, false>, dim3(g.blocks()),
             dim3(block), BlockSums::bytes, data<T>(x), data<float>(w), turns, g, eps, data<T>(y));
    });
  });
}

// T5's.
void rms_norm_forward(const Tensor& x, const Tensor& w, float eps, Tensor& y) {
  rms_rope_forward(x, w, Tensor(), 1, eps, y);
}

void rms_rope_backward(const Tensor& x, const Tensor& w, const Tensor& rope, int heads, float eps,
                       const Tensor& dy, Tensor& dx, Tensor& dw) {
  const FrameGrid g = with_even_runs(samples_of(x, rope), slots(backward_blocks));
  const Turns turns = turns_of(rope, g.channels, heads);
  const bool turned = rope.defined();
  const Tensor partial = Tensor::empty({g.frames, g.runs, g.channels}, DType::f32);
  by_type(x, [&]<class T>() {
    by_row(g.channels, [&]<int N>(int block) {
      launch(turned ? rms_rope_backward_kernel<T, N, true> : rms_rope_backward_kernel<T, N, false>,
             dim3(g.blocks()), dim3(block), BlockSums::bytes, data<T>(x), data<float>(w), turns, g,
             eps, data<T>(dy), data<T>(dx), data<float>(partial));
    });
  });
  if (dw.defined())
    add_columns(data<float>(partial), g.frames * g.runs, g.channels, g.channels, data<float>(dw));
}

}  // namespace weft::ops::cuda
