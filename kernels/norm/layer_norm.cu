// LayerNorm of ops/norm.h on the GPU, for rows that a warp holds, of one type; norm_rows.cu has the
// others. CPU twin: src/ops/cpu/norm.cpp; cases: tests/kernels/norm.cpp.
//
// Bound by memory. Least traffic for one token of C = 1152 channels in bf16 (a row is 2304
// bytes), f32 twice that:
//   layer_norm_modulate_forward    x in, y out              4608 bytes, about 8 C operations
//   layer_norm_modulate_backward   x, dy in, dx out 6912 bytes, or 9216 with `accumulate`; about 14
//                                  C operations
// At 4.8 TB/s an SM of an H200 has some 220 clocks for a token of 4608 bytes, about 24 instructions
// an element: enough, as long as every byte moves once and some 30 KB a SM are on the way at any
// time, which a warp a token with all of its row in registers gives (frames.cuh). The modulation
// rows (f32, shared by a whole frame) come from the first-level cache.
//
// Scratch (Tensor::empty) of the backward: 8 C bytes a run. There are about as many runs as blocks
// fit on the GPU, at least one a frame: 3.6 MB at 30 frames of C = 1152 on 132 SMs.
#include "ops/norm.h"

#include "norm/rows.cuh"

namespace weft::kernels {
namespace {

constexpr float epsilon = 1e-6f;

// ---------------------------------------------------------------- layer_norm_modulate_forward

// Two tokens a warp at a time: the loads of both are on the way together, and the modulation is
// read once for the two.
template <class T, int N>
__global__ void __launch_bounds__(forward_warps * 32, 2)
    modulate_forward_kernel(const T* __restrict__ x, const float* __restrict__ m,
                            const std::int32_t* __restrict__ rows, FrameGrid g, int shift,
                            int scale, int first_row, T* __restrict__ y,
                            float2* __restrict__ stats) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, quads = g.channels / 4;
  const int frame = g.frame(), first = g.first() + 2 * warp;
  if (first >= g.tokens) return;
  const int count = min(2, g.tokens - first);
  const int group = rows[frame];
  Quad<T> in[2][N];
  std::int64_t row[2];
#pragma unroll
  for (int t = 0; t < 2; ++t) {
    row[t] = g.row(
        frame, first + min(t, count - 1));  // a missing second token is the first again, not stored
    load_row(x + row[t], quads, in[t]);
  }
  if (group < first_row) {
#pragma unroll
    for (int t = 0; t < 2; ++t)
#pragma unroll
      for (int n = 0; n < N; ++n)
        if (n * 32 + lane < quads && t < count) store_vec<4>(y + row[t], n * 32 + lane, in[t][n]);
    return;
  }
  float mean[2], rstd[2];
#pragma unroll
  for (int t = 0; t < 2; ++t) {
    float sum = 0.0f, squares = 0.0f;
#pragma unroll
    for (int n = 0; n < N; ++n) {
      float v[4];
      unpack(in[t][n], v);
      sum += (v[0] + v[1]) + (v[2] + v[3]);
    }
    mean[t] = warp_sum(sum) / static_cast<float>(g.channels);
    // Around the mean, as the CPU does: with a large mean the difference of two large sums would
    // cancel.
#pragma unroll
    for (int n = 0; n < N; ++n)
      if (n * 32 + lane < quads) {
        float v[4];
        unpack(in[t][n], v);
#pragma unroll
        for (int e = 0; e < 4; ++e) squares += (v[e] - mean[t]) * (v[e] - mean[t]);
      }
    rstd[t] = rsqrtf(warp_sum(squares) / static_cast<float>(g.channels) + epsilon);
    if (lane == 0 && t < count)
      stats[static_cast<std::int64_t>(frame) * g.tokens + first + t] =
          make_float2(mean[t], rstd[t]);
  }
  const float *sh = g.vector(m, group, shift), *sc = g.vector(m, group, scale);
#pragma unroll
  for (int n = 0; n < N; ++n) {
    const int i = n * 32 + lane;
    if (i >= quads) continue;
    const Quad<float> a = load_vec<4>(sc, i), b = load_vec<4>(sh, i);
#pragma unroll
    for (int t = 0; t < 2; ++t) {
      float v[4];
      unpack(in[t][n], v);
#pragma unroll
      for (int e = 0; e < 4; ++e) v[e] = (v[e] - mean[t]) * rstd[t] * (1.0f + a.v[e]) + b.v[e];
      if (t < count) store_vec<4>(y + row[t], i, pack<T, 4>(v));
    }
  }
}

// ---------------------------------------------------------------- layer_norm_modulate_backward

// With h = LN(x), s = 1 + scale, g = dy: dx = rstd (g s - mean(g s) - h mean(g s h)), sums of g and
// g h over the run. A warp a token; the gradient that is added to, if any, is loaded together with
// the rest.
template <class T, int N, bool accumulate>
__global__ void __launch_bounds__(backward_warps * 32, sizeof(T) == 2 ? 3 : 2)
    modulate_backward_kernel(const T* __restrict__ x, const float* __restrict__ m,
                             const std::int32_t* __restrict__ rows, FrameGrid g, int scale,
                             int first_row, const float2* __restrict__ stats,
                             const T* __restrict__ dy, T* dx, float* __restrict__ partial) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, quads = g.channels / 4;
  const int frame = g.frame(), last = g.last(), group = rows[frame];
  if (group < first_row) {
    for (int token = g.first() + warp; token < last; token += backward_warps) {
      const std::int64_t row = g.row(frame, token);
      Quad<T> in[N], old[N];
      load_row(dy + row, quads, in);
      if constexpr (accumulate) load_row(dx + row, quads, old);
#pragma unroll
      for (int n = 0; n < N; ++n) {
        if constexpr (accumulate) {
          float v[4], w[4];
          unpack(in[n], v);
          unpack(old[n], w);
#pragma unroll
          for (int e = 0; e < 4; ++e) v[e] += w[e];
          in[n] = pack<T, 4>(v);
        }
        if (n * 32 + lane < quads) store_vec<4>(dx + row, n * 32 + lane, in[n]);
      }
    }
    return;
  }
  const float* sc = g.vector(m, group, scale);
  float dshift[N][4] = {}, dscale[N][4] = {};
  for (int token = g.first() + warp; token < last; token += backward_warps) {
    const std::int64_t row = g.row(frame, token);
    Quad<T> in[N], gradient[N], old[N];
    load_row(x + row, quads, in);
    load_row(dy + row, quads, gradient);
    if constexpr (accumulate) load_row(static_cast<const T*>(dx + row), quads, old);
    const float2 st = stats[static_cast<std::int64_t>(frame) * g.tokens + token];
    float sum = 0.0f, product = 0.0f;
#pragma unroll
    for (int n = 0; n < N; ++n) {
      if (n * 32 + lane >= quads) continue;
      const Quad<float> s = load_vec<4>(sc, n * 32 + lane);
      float v[4], d[4];
      unpack(in[n], v);
      unpack(gradient[n], d);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float h = (v[e] - st.x) * st.y, gh = d[e] * h, s1 = 1.0f + s.v[e];
        sum += d[e] * s1;
        product += gh * s1;
        dshift[n][e] += d[e];
        dscale[n][e] += gh;
      }
    }
    const float mean_g = warp_sum(sum) / static_cast<float>(g.channels);
    const float mean_gh = warp_sum(product) / static_cast<float>(g.channels);
#pragma unroll
    for (int n = 0; n < N; ++n) {
      if (n * 32 + lane >= quads) continue;
      const Quad<float> s = load_vec<4>(sc, n * 32 + lane);
      float v[4], d[4], w[4];
      unpack(in[n], v);
      unpack(gradient[n], d);
      if constexpr (accumulate) unpack(old[n], w);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float h = (v[e] - st.x) * st.y;
        v[e] = st.y * (d[e] * (1.0f + s.v[e]) - mean_g - h * mean_gh);
        if constexpr (accumulate) v[e] += w[e];
      }
      store_vec<4>(dx + row, n * 32 + lane, pack<T, 4>(v));
    }
  }
  float* out = partial + static_cast<std::int64_t>(blockIdx.x) * 2 * g.channels;
  store_column_sums(dshift, g.channels, shared_memory<float>(), out);
  store_column_sums(dscale, g.channels, shared_memory<float>(), out + g.channels);
}

// Norm by a modulation, for norm_rows.cu.
RowNorm row_norm(const FrameGrid& g, const Tensor& m, const Tensor& rows, int shift, int scale,
                 int first_row) {
  const float* vectors = data<float>(m);
  return {vectors + static_cast<std::int64_t>(scale) * g.channels,
          vectors + static_cast<std::int64_t>(shift) * g.channels,
          data<std::int32_t>(rows),
          1.0f,
          first_row,
          g};
}

}  // namespace
}  // namespace weft::kernels

namespace weft::ops::cuda {

using namespace kernels;  // NOLINT: the operations are written in the kernels' words

void layer_norm_modulate_forward(const Tensor& x, const Tensor& m, const Tensor& rows, int shift,
                                 int scale, int first_row, Tensor& y, Tensor& stats) {
  const FrameGrid g = with_run(grid_of(x, m, rows), 2 * forward_warps);
  if (x.dtype() != y.dtype() || !in_quads(g.channels, x, m, y))
    return norm_rows_forward(row_norm(g, m, rows, shift, scale, first_row), x, y, stats);
  auto* st = reinterpret_cast<float2*>(data<float>(stats));
  by_type(x, [&]<class T>() {
    by_steps(g.channels, [&]<int N>() {
      launch(modulate_forward_kernel<T, N>, dim3(g.blocks()), dim3(forward_warps * 32), 0,
             data<T>(x), data<float>(m), data<std::int32_t>(rows), g, shift, scale, first_row,
             data<T>(y), st);
    });
  });
}

void layer_norm_modulate_backward(const Tensor& x, const Tensor& m, const Tensor& rows, int shift,
                                  int scale, int first_row, const Tensor& stats, const Tensor& dy,
                                  Tensor& dx, bool accumulate, Tensor& dm) {
  const FrameGrid grid = grid_of(x, m, rows);
  const bool by_warps = x.dtype() == dy.dtype() && in_quads(grid.channels, x, m, dy, dx);
  const FrameGrid g = with_even_runs(grid, slots(!by_warps                  ? norm_rows_blocks
                                                 : x.dtype() == DType::bf16 ? 3
                                                                            : 2));
  const Tensor partial = Tensor::empty({g.frames, g.runs, 2, g.channels}, DType::f32);
  const auto* st = reinterpret_cast<const float2*>(data<float>(stats));
  if (!by_warps)
    norm_rows_backward(row_norm(g, m, rows, shift, scale, first_row), x, stats, dy, dx, accumulate,
                       partial);
  else
    by_type(x, [&]<class T>() {
      const auto start = [&](auto kernel) {
        launch(kernel, dim3(g.blocks()), dim3(backward_warps * 32),
               backward_warps * static_cast<std::size_t>(g.channels) * sizeof(float), data<T>(x),
               data<float>(m), data<std::int32_t>(rows), g, scale, first_row, st, data<T>(dy),
               data<T>(dx), data<float>(partial));
      };
      by_steps(g.channels, [&]<int N>() {
        if (accumulate)
          start(modulate_backward_kernel<T, N, true>);
        else
          start(modulate_backward_kernel<T, N, false>);
      });
    });
  add_partials(partial, rows, g, 2, shift, scale, first_row, dm);
}

}  // namespace weft::ops::cuda
