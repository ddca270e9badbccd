// LayerNorm of long rows, and the affine one of ops/norm.h on the GPU (rows.cuh). CPU twin:
// src/ops/cpu/norm.cpp; cases: tests/kernels/norm.cpp.
//
// Bound by memory. Least traffic for one token of C = 1536 channels, x in f32 and y in bf16:
//   forward    x in, y out                 9216 bytes
//   backward   x, dy in, dx out           15360 bytes, or 21504 with `accumulate`
//
// Scratch (Tensor::empty) of the backward: 8 C bytes a run, 6.5 MB at C = 1536 on 132 SMs.
#include "ops/norm.h"

#include "norm/rows.cuh"

namespace weft::kernels {
namespace {

constexpr float row_epsilon = 1e-6f;
constexpr int forward_run = 8;  // tokens of a block: the vectors are read once for them

template <class X, class Y, int N>
__global__ void __launch_bounds__(row_threads, 1)
    norm_rows_kernel(const X* __restrict__ x, RowNorm norm, Y* __restrict__ y,
                     float2* __restrict__ stats) {
  const FrameGrid& g = norm.g;
  const int frame = g.frame(), group = norm.group(frame), last = g.last();
  BlockSums sums;
  Quad<float> scale[N], shift[N];
  load_quads(norm.scale + norm.offset(group), g.channels, scale);
  load_quads(norm.shift + norm.offset(group), g.channels, shift);
  for (int token = g.first(); token < last; ++token) {
    const std::int64_t row = g.row(frame, token);
    Quad<X> in[N];
    load_quads(x + row, g.channels, in);
    float sum = 0.0f, squares = 0.0f;
    if (group >= norm.first_row) {
#pragma unroll
      for (int n = 0; n < N; ++n) {
        float v[4];
        unpack(in[n], v);
        sum += (v[0] + v[1]) + (v[2] + v[3]);
      }
    }
    const float mean = sums(sum) / static_cast<float>(g.channels);
    // Around the mean: the difference of two large sums would cancel.
#pragma unroll
    for (int n = 0; n < N; ++n)
      if (row_quad(n) * 4 < g.channels) {
        float v[4];
        unpack(in[n], v);
#pragma unroll
        for (int e = 0; e < 4; ++e) squares += (v[e] - mean) * (v[e] - mean);
      }
    const float rstd = rsqrtf(sums(squares) / static_cast<float>(g.channels) + row_epsilon);
    if (threadIdx.x == 0 && group >= norm.first_row)
      stats[static_cast<std::int64_t>(frame) * g.tokens + token] = make_float2(mean, rstd);
#pragma unroll
    for (int n = 0; n < N; ++n) {
      if (row_quad(n) * 4 >= g.channels) continue;
      float v[4];
      unpack(in[n], v);
      if (group >= norm.first_row) {
#pragma unroll
        for (int e = 0; e < 4; ++e)
          v[e] = (v[e] - mean) * rstd * (norm.one + scale[n].v[e]) + shift[n].v[e];
      }
      store_vec<4>(y + row, row_quad(n), pack<Y, 4>(v));
    }
  }
}

// The formula stands in layer_norm.cu.
template <class X, class Y, int N, bool accumulate>
__global__ void __launch_bounds__(row_threads, 1)
    norm_rows_backward_kernel(const X* __restrict__ x, RowNorm norm,
                              const float2* __restrict__ stats, const Y* __restrict__ dy, X* dx,
                              float* __restrict__ partial) {
  // What was in dx is read before the sums where registers can hold it, else after them.
  constexpr bool early = accumulate && N < 5, late = accumulate && !early;
  const FrameGrid& g = norm.g;
  const int frame = g.frame(), group = norm.group(frame), last = g.last();
  const bool passes = group < norm.first_row;
  BlockSums sums;
  Quad<float> scale[N];
  load_quads(norm.scale + norm.offset(group), g.channels, scale);
  float dshift[N][4] = {}, dscale[N][4] = {};
  for (int token = g.first(); token < last; ++token) {
    const int here = late ? opaque(frame) : frame;  // else 64-bit products of it are kept
    const std::int64_t row = g.row(here, token);
    Quad<X> in[N], old[N];
    Quad<Y> gradient[N];
    load_quads(x + row, g.channels, in);
    load_quads(dy + row, g.channels, gradient);
    if constexpr (early) load_quads(static_cast<const X*>(dx + row), g.channels, old);
    const float2 st = passes ? make_float2(0.0f, 0.0f)
                             : stats[static_cast<std::int64_t>(here) * g.tokens + token];
    float sum = 0.0f, product = 0.0f;
#pragma unroll
    for (int n = 0; n < N; ++n) {
      float v[4], d[4];
      unpack(in[n], v);
      unpack(gradient[n], d);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float h = (v[e] - st.x) * st.y, gh = d[e] * h, s = norm.one + scale[n].v[e];
        sum += d[e] * s;
        product += gh * s;
        dshift[n][e] += d[e];
        dscale[n][e] += gh;
      }
    }
    const float2 both = sums(sum, product);
    const float mean_g = both.x / static_cast<float>(g.channels);
    const float mean_gh = both.y / static_cast<float>(g.channels);
    const auto slope = [&](int n, float(&to)[4]) {
      float v[4], d[4];
      unpack(in[n], v);
      unpack(gradient[n], d);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float h = (v[e] - st.x) * st.y;
        to[e] = passes ? d[e] : st.y * (d[e] * (norm.one + scale[n].v[e]) - mean_g - h * mean_gh);
      }
    };
    const auto put = [&](int n, float(&to)[4]) {
      if constexpr (accumulate) {
        float w[4];
        unpack(old[n], w);
#pragma unroll
        for (int e = 0; e < 4; ++e) to[e] += w[e];
      }
      store_vec<4>(dx + row, row_quad(n), pack<X, 4>(to));
    };
    if constexpr (late) {
      float to[N][4];
#pragma unroll
      for (int n = 0; n < N; ++n) slope(n, to[n]);
      load_quads(static_cast<const X*>(dx + row), g.channels, old);
#pragma unroll
      for (int n = 0; n < N; ++n)
        if (row_quad(n) * 4 < g.channels) put(n, to[n]);
    } else {
#pragma unroll
      for (int n = 0; n < N; ++n) {
        if (row_quad(n) * 4 >= g.channels) continue;
        float to[4];
        slope(n, to);
        put(n, to);
      }
    }
  }
  float* out = partial + static_cast<std::int64_t>(blockIdx.x) * 2 * g.channels;
  store_sums(dshift, g.channels, out);
  store_sums(dscale, g.channels, out + g.channels);
}

constexpr int column_warps = 16;
constexpr int columns_in_flight = 8;  // loads of a thread

// As add_partials_kernel of modulation.cu, of one group.
__global__ void __launch_bounds__(column_warps * 32)
    add_columns_kernel(const float* __restrict__ partial, int count, int stride, int channels,
                       float* __restrict__ to) {
  float* sums = shared_memory<float>();  // [column_warps, 32]
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int column = static_cast<int>(blockIdx.x) * 32 + lane;
  float sum = 0.0f;
  if (column < channels)
    for (int first = warp; first < count; first += columns_in_flight * column_warps) {
      float x[columns_in_flight];
#pragma unroll
      for (int j = 0; j < columns_in_flight; ++j) {
        const int q = first + j * column_warps;
        x[j] = q < count ? partial[static_cast<std::int64_t>(q) * stride + column] : 0.0f;
      }
#pragma unroll
      for (int j = 0; j < columns_in_flight; ++j) sum += x[j];
    }
  sums[threadIdx.x] = sum;
  __syncthreads();
  if (warp > 0 || column >= channels) return;
  for (int w = 1; w < column_warps; ++w) sum += sums[w * 32 + lane];
  to[column] += sum;
}

// All rows of an affine norm are one frame.
RowNorm affine(const Tensor& x, const Tensor& w, const float* shift) {
  FrameGrid g{};
  g.frames = g.vectors = 1;
  g.channels = static_cast<int>(w.numel());
  g.tokens = static_cast<int>(x.numel() / w.numel());
  return {data<float>(w), shift, nullptr, 0.0f, 0, g};
}

}  // namespace

void norm_rows_forward(RowNorm norm, const Tensor& x, Tensor& y, Tensor& stats) {
  norm.g = with_run(norm.g, forward_run);
  auto* st = reinterpret_cast<float2*>(data<float>(stats));
  by_stream(x, y, [&]<class X, class Y>() {
    by_row(norm.g.channels, [&]<int N>(int block) {
      launch(norm_rows_kernel<X, Y, N>, dim3(norm.g.blocks()), dim3(block), BlockSums::bytes,
             data<X>(x), norm, data<Y>(y), st);
    });
  });
}

void norm_rows_backward(const RowNorm& norm, const Tensor& x, const Tensor& stats, const Tensor& dy,
                        Tensor& dx, bool accumulate, const Tensor& partial) {
  const FrameGrid& g = norm.g;
  const auto* st = reinterpret_cast<const float2*>(data<float>(stats));
  by_stream(x, dy, [&]<class X, class Y>() {
    by_row(g.channels, [&]<int N>(int block) {
      const auto start = [&](auto kernel) {
        launch(kernel, dim3(g.blocks()), dim3(block), BlockSums::bytes, data<X>(x), norm, st,
               data<Y>(dy), data<X>(dx), data<float>(partial));
      };
      if (accumulate)
        start(norm_rows_backward_kernel<X, Y, N, true>);
      else
        start(norm_rows_backward_kernel<X, Y, N, false>);
    });
  });
}

void add_columns(const float* partial, int count, int stride, int channels, float* to) {
  launch(add_columns_kernel, dim3(blocks_for(channels, 32)), dim3(column_warps * 32),
         column_warps * 32 * sizeof(float), partial, count, stride, channels, to);
}

}  // namespace weft::kernels

namespace weft::ops::cuda {

using namespace kernels;  // NOLINT: the operations are written in the kernels' words

void layer_norm_affine_forward(const Tensor& x, const Tensor& w, const Tensor& b, Tensor& y,
                               Tensor& stats) {
  norm_rows_forward(affine(x, w, data<float>(b)), x, y, stats);
}

void layer_norm_affine_backward(const Tensor& x, const Tensor& w, const Tensor& stats,
                                const Tensor& dy, Tensor& dx, bool accumulate, Tensor& dw,
                                Tensor& db) {
  RowNorm norm = affine(x, w, nullptr);
  norm.g = with_even_runs(norm.g, slots(norm_rows_blocks));
  const int c = norm.g.channels;
  const Tensor partial = Tensor::empty({norm.g.runs, 2, c}, DType::f32);
  norm_rows_backward(norm, x, stats, dy, dx, accumulate, partial);
  if (!dw.defined()) return;
  add_columns(data<float>(partial), norm.g.runs, 2 * c, c, data<float>(db));
  add_columns(data<float>(partial) + c, norm.g.runs, 2 * c, c, data<float>(dw));
}

}  // namespace weft::ops::cuda
