// The channel norm of ops/norm.h on the GPU: each position's channels over their length, times
// gamma, with SiLU behind. CPU twin: src/ops/cpu/channel_norm.cpp; cases: tests/kernels/norm.cpp.
//
// Bound by memory: forward x in, y out; backward x and dy in, dx out, one more where it adds. A
// warp holds whole positions in registers (frames.cuh), several of them where channels are few, so
// that enough bytes are on the way: the VAE's largest activations have 96 channels, 192 bytes in
// bf16.
//
// dgamma is summed by each block over its run of positions, then over the blocks, in an order that
// the shape and the number of SMs decide: no atomics. Scratch of the backward: 4 C bytes a block.
#include "math.cuh"
#include "matmul/product.cuh"
#include "norm/frames.cuh"
#include "ops/norm.h"

namespace weft::kernels {
namespace {

// sqrt(C) / |x| and 1 / |x|^2 from the sum of squares; a position that is too short is divided by a
// constant.
struct RowScale {
  float scale, along;
  __device__ __forceinline__ RowScale(float squares, int C) {
    const float length = sqrtf(squares);
    scale = sqrtf(static_cast<float>(C)) / fmaxf(length, ops::shortest_channels);
    along = length > ops::shortest_channels ? 1.0f / squares : 0.0f;
  }
};

template <bool silu>
__device__ __forceinline__ float behind(float dy, float u) {
  if constexpr (!silu) return dy;
  const float s = sigmoid(u);
  return dy * s * (1.0f + u * (1.0f - s));
}

template <class T, int N, int R, bool silu>
__global__ void __launch_bounds__(forward_warps * 32)
    channel_norm_forward_kernel(const T* x, const float* __restrict__ gamma, std::int64_t rows,
                                int C, T* y) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, quads = C / 4;
  const std::int64_t first = (static_cast<std::int64_t>(blockIdx.x) * forward_warps + warp) * R;
  if (first >= rows) return;
  Quad<T> in[R][N];
#pragma unroll
  for (int r = 0; r < R; ++r)  // a missing row is the last one again, not stored
    load_row(x + (first + r < rows ? first + r : rows - 1) * C, quads, in[r]);
  float scale[R];
#pragma unroll
  for (int r = 0; r < R; ++r) {
    float squares = 0.0f;
#pragma unroll
    for (int n = 0; n < N; ++n) {
      float v[4];
      unpack(in[r][n], v);
      squares += (v[0] * v[0] + v[1] * v[1]) + (v[2] * v[2] + v[3] * v[3]);
    }
    scale[r] = RowScale(warp_sum(squares), C).scale;
  }
#pragma unroll
  for (int n = 0; n < N; ++n) {
    const int i = n * 32 + lane;
    if (i >= quads) continue;
    const Quad<float> g = load_vec<4>(gamma, i);
#pragma unroll
    for (int r = 0; r < R; ++r) {
      float v[4];
      unpack(in[r][n], v);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        v[e] *= scale[r] * g.v[e];
        if constexpr (silu) v[e] *= sigmoid(v[e]);
      }
      if (first + r < rows) store_vec<4>(y + (first + r) * C, i, pack<T, 4>(v));
    }
  }
}

// Any C: a warp a position, read twice.
template <class T, bool silu>
__global__ void __launch_bounds__(forward_warps * 32)
    channel_norm_forward_any_kernel(const T* x, const float* gamma, std::int64_t rows, int C,
                                    T* y) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * forward_warps + warp;
  if (row >= rows) return;
  float squares = 0.0f;
  for (int i = lane; i < C; i += 32) {
    const float v = to_float(x[row * C + i]);
    squares += v * v;
  }
  const float scale = RowScale(warp_sum(squares), C).scale;
  for (int i = lane; i < C; i += 32) {
    float u = to_float(x[row * C + i]) * scale * gamma[i];
    if constexpr (silu) u *= sigmoid(u);
    y[row * C + i] = from_float<T>(u);
  }
}

// A block takes the rows [run * block, run * (block + 1)); partial [blocks,C] = their sums of the
// gradient before gamma times the normalised x.
template <class T, int N, bool silu>
__global__ void __launch_bounds__(backward_warps * 32)
    channel_norm_backward_kernel(const T* x, const float* __restrict__ gamma, const T* dy,
                                 std::int64_t rows, std::int64_t run, int C, T* dx, bool accumulate,
                                 float* partial) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, quads = C / 4;
  const std::int64_t first = blockIdx.x * run, last = first + run < rows ? first + run : rows;
  float sums[N][4] = {};
  for (std::int64_t row = first + warp; row < last; row += backward_warps) {
    Quad<T> in[N], gradient[N], old[N] = {};
    load_row(x + row * C, quads, in);
    load_row(dy + row * C, quads, gradient);
    if (accumulate) load_row(static_cast<const T*>(dx) + row * C, quads, old);
    float squares = 0.0f, product = 0.0f;
#pragma unroll
    for (int n = 0; n < N; ++n) {
      float v[4];
      unpack(in[n], v);
      squares += (v[0] * v[0] + v[1] * v[1]) + (v[2] * v[2] + v[3] * v[3]);
    }
    const RowScale s(warp_sum(squares), C);
    float b[N][4] = {};  // the gradient before SiLU, times gamma
#pragma unroll
    for (int n = 0; n < N; ++n) {
      if (n * 32 + lane >= quads) continue;
      const Quad<float> g = load_vec<4>(gamma, n * 32 + lane);
      float v[4], d[4];
      unpack(in[n], v);
      unpack(gradient[n], d);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float h = v[e] * s.scale, to = behind<silu>(d[e], h * g.v[e]);
        sums[n][e] += to * h;
        b[n][e] = to * g.v[e];
        product += b[n][e] * v[e];
      }
    }
    const float along = warp_sum(product) * s.along;
#pragma unroll
    for (int n = 0; n < N; ++n) {
      if (n * 32 + lane >= quads) continue;
      float v[4], o[4];
      unpack(in[n], v);
      unpack(old[n], o);
#pragma unroll
      for (int e = 0; e < 4; ++e) v[e] = o[e] + s.scale * (b[n][e] - v[e] * along);
      store_vec<4>(dx + row * C, n * 32 + lane, pack<T, 4>(v));
    }
  }
  store_column_sums(sums, C, shared_memory<float>(),
                    partial + static_cast<std::int64_t>(blockIdx.x) * C);
}

// Any C: a block a position, its column sums in shared memory, where a thread meets its own columns
// only.
template <class T, bool silu>
__global__ void __launch_bounds__(backward_warps * 32)
    channel_norm_backward_any_kernel(const T* x, const float* gamma, const T* dy, std::int64_t rows,
                                     std::int64_t run, int C, T* dx, bool accumulate,
                                     float* partial) {
  constexpr int block_threads = backward_warps * 32;
  float *scratch = shared_memory<float>(), *sums = scratch + 32;
  for (int i = threadIdx.x; i < C; i += block_threads) sums[i] = 0.0f;
  const std::int64_t first = blockIdx.x * run, last = first + run < rows ? first + run : rows;
  for (std::int64_t row = first; row < last; ++row) {
    const T *in = x + row * C, *from = dy + row * C;
    float squares = 0.0f, product = 0.0f;
    for (int i = threadIdx.x; i < C; i += block_threads) {
      const float v = to_float(in[i]);
      squares += v * v;
    }
    const RowScale s(block_sum(squares, scratch), C);
    for (int i = threadIdx.x; i < C; i += block_threads) {
      const float v = to_float(in[i]), h = v * s.scale;
      const float to = behind<silu>(to_float(from[i]), h * gamma[i]);
      sums[i] += to * h;
      product += to * gamma[i] * v;
    }
    const float along = block_sum(product, scratch) * s.along;
    for (int i = threadIdx.x; i < C; i += block_threads) {
      const float v = to_float(in[i]), to = behind<silu>(to_float(from[i]), v * s.scale * gamma[i]);
      const float old = accumulate ? to_float(dx[row * C + i]) : 0.0f;
      dx[row * C + i] = from_float<T>(old + s.scale * (to * gamma[i] - v * along));
    }
  }
  for (int i = threadIdx.x; i < C; i += block_threads)
    partial[static_cast<std::int64_t>(blockIdx.x) * C + i] = sums[i];
}

// Calls f.operator()<T, silu>().
template <class F>
void by_instance(const Tensor& x, bool silu, F&& f) {
  by_type(x, [&]<class T>() {
    if (silu)
      f.template operator()<T, true>();
    else
      f.template operator()<T, false>();
  });
}

}  // namespace
}  // namespace weft::kernels

namespace weft::ops::cuda {

using namespace kernels;  // NOLINT: the operations are written in the kernels' words

void channel_norm_forward(const Tensor& x, const Tensor& gamma, bool silu, Tensor& y) {
  if (x.numel() == 0) return;
  const int C = static_cast<int>(gamma.numel());
  const std::int64_t rows = x.numel() / C;
  by_instance(x, silu, [&]<class T, bool with_silu>() {
    const auto start = [&](auto kernel, int rows_a_warp) {
      launch(kernel, dim3(blocks_for(rows, forward_warps * rows_a_warp)), dim3(forward_warps * 32),
             0, data<T>(x), data<float>(gamma), rows, C, data<T>(y));
    };
    if (in_quads(C, x, gamma, y))
      by_steps(C, [&]<int N>() {
        constexpr int R = N == 1 ? 4 : N == 3 ? 2 : 1;
        start(channel_norm_forward_kernel<T, N, R, with_silu>, R);
      });
    else
      start(channel_norm_forward_any_kernel<T, with_silu>, 1);
  });
}

void channel_norm_backward(const Tensor& x, const Tensor& gamma, bool silu, const Tensor& dy,
                           Tensor& dx, bool accumulate, Tensor& dgamma) {
  if (x.numel() == 0) return;
  const int C = static_cast<int>(gamma.numel());
  const std::int64_t rows = x.numel() / C;
  // Four blocks an SM, but no run so short that its partial sums cost more than its rows.
  const std::int64_t run = std::max<std::int64_t>(32, (rows + slots(4) - 1) / slots(4));
  const int blocks = static_cast<int>((rows + run - 1) / run);
  const Tensor partial = Tensor::empty({blocks, C}, DType::f32);
  by_instance(x, silu, [&]<class T, bool with_silu>() {
    const auto start = [&](auto kernel, std::size_t shared) {
      launch(kernel, dim3(static_cast<unsigned>(blocks)), dim3(backward_warps * 32),
             shared * sizeof(float), data<T>(x), data<float>(gamma), data<T>(dy), rows, run, C,
             data<T>(dx), accumulate, data<float>(partial));
    };
    const auto channels = static_cast<std::size_t>(C);
    if (in_quads(C, x, gamma, dy, dx, partial))
      by_steps(C, [&]<int N>() {
        start(channel_norm_backward_kernel<T, N, with_silu>, backward_warps * channels);
      });
    else
      start(channel_norm_backward_any_kernel<T, with_silu>, 32 + channels);
  });
  if (dgamma.defined()) column_sums(partial, blocks, C, data<float>(dgamma), true);
}

}  // namespace weft::ops::cuda
