// CUDA side of ops/norm.h. CPU twin: src/ops/cpu/spade.cpp; cases:
// tests/kernels/spade.cpp.
//
// Bound by memory: v is one map. Statistics 1 v; the norm 4 v (x, gamma, beta, y), 3.25 v from a
// map of half the size, which is never written at the full one. A thread keeps 16 bytes of channels
// with their mean and deviation in registers and walks down the positions. Scratch of the
// statistics: 2 C f32 for each of at most 512 pieces a sample; no atomics.
#include "ops/norm.h"

#include "channels.cuh"
#include "core/error.h"
#include "divide.cuh"

namespace weft::kernels {
namespace {

template <class T>
__global__ void __launch_bounds__(32 * sum_warps)
    instance_statistics_kernel(const float* partial, const T* x, Grid g, float* statistics) {
  const std::int64_t c = static_cast<std::int64_t>(blockIdx.x) * 32 + threadIdx.x % 32,
                     n = blockIdx.y;
  double totals[2];
  add_chunks(partial + n * g.chunks * 2 * g.C, g.chunks, g.C, c, totals);
  if (threadIdx.x >= 32 || c >= g.C) return;
  const double count = static_cast<double>(g.P), mean = totals[0] / count;
  const double variance = totals[1] / count - mean * mean;
  float* const to = statistics + n * 2 * g.C + c;
  to[0] = static_cast<float>(to_float(x[n * g.P * g.C + c]) + mean);
  to[g.C] =
      static_cast<float>(1.0 / sqrt((variance > 0.0 ? variance : 0.0) + ops::instance_norm_eps));
}

// g is y's grid, `width` divides by y's columns. times: 2 where x has half of y's rows and columns,
// else 1.
template <class T, int V, int times>
__global__ void __launch_bounds__(threads)
    spade_kernel(const T* x, const float* statistics, const T* gamma_beta, Grid g, Divisor width,
                 int columns, float slope, T* y) {
  const Place p = place(g);
  if (!p.active) return;
  float mean[V], rstd[V];
#pragma unroll
  for (int k = 0; k < V; ++k) {
    const float* const s =
        statistics + p.sample * 2 * g.C + static_cast<std::int64_t>(p.pack) * V + k;
    mean[k] = s[0];
    rstd[k] = s[g.C];
  }
  const std::int64_t sample = p.sample * (g.P / (times * times));
#pragma unroll 2
  for (std::int64_t r = p.row; r < p.last; r += p.step) {
    std::int64_t from = sample + r;
    if constexpr (times > 1) {
      unsigned column = static_cast<unsigned>(r);
      const unsigned row = width.split(column);
      from = sample + row / times * (static_cast<unsigned>(columns) / times) + column / times;
    }
    const std::int64_t at = p.sample * g.P + r;
    float v[V], gamma[V], beta[V];
    unpack(load_vec<V>(x, from * g.packs + p.pack), v);
    unpack(load_vec<V>(gamma_beta, at * 2 * g.packs + p.pack), gamma);
    unpack(load_vec<V>(gamma_beta, (at * 2 + 1) * g.packs + p.pack), beta);
#pragma unroll
    for (int k = 0; k < V; ++k) {
      const float z = (v[k] - mean[k]) * rstd[k] * (1.0f + gamma[k]) + beta[k];
      v[k] = z < 0.0f ? z * slope : z;
    }
    store_vec<V>(y, at * g.packs + p.pack, pack<T, V>(v));
  }
}

}  // namespace
}  // namespace weft::kernels

namespace weft::ops::cuda {

using namespace kernels;  // NOLINT: the operations are written in the kernels' words

void instance_statistics(const Tensor& x, Tensor& statistics) {
  if (x.numel() == 0) return;
  by_access(
      x.dim(-1),
      [&]<class T, int V>() {
        const Grid g = grid_of<V>(x, 1);
        WEFT_ASSERT(statistics.shape() == Shape({g.N, 2, g.C}));
        WEFT_ASSERT(g.chunks == instance_pieces(g.P).count);
        const Tensor partial = Tensor::empty({g.N * g.chunks, 2, g.C}, DType::f32);
        launch(moments_kernel<T, V>, blocks_of(g), dim3(threads), shared_of<V>(g), data<T>(x), g,
               data<float>(partial));
        launch(instance_statistics_kernel<T>, dim3(blocks_for(g.C, 32), static_cast<unsigned>(g.N)),
               dim3(32 * sum_warps), 2 * 32 * sum_warps * sizeof(double), data<float>(partial),
               data<T>(x), g, data<float>(statistics));
      },
      x);
}

void spade(const Tensor& x, const Tensor& statistics, const Tensor& gamma_beta, bool upsample,
           float slope, Tensor& y) {
  const std::int64_t N = y.dim(0), H = y.dim(2), W = y.dim(3), C = y.dim(4),
                     times = upsample ? 2 : 1;
  WEFT_ASSERT(y.dim(1) == 1 && x.shape() == Shape({N, 1, H / times, W / times, C}));
  WEFT_ASSERT(H % times == 0 && W % times == 0 && gamma_beta.shape() == Shape({N, 1, H, W, 2 * C}));
  WEFT_ASSERT(statistics.shape() == Shape({N, 2, C}));
  if (y.numel() == 0) return;
  by_access(
      y.dim(-1),
      [&]<class T, int V>() {
        const Grid g = grid_of<V>(y, 1);
        WEFT_ASSERT(g.P < std::int64_t{1} << 31);
        launch(upsample ? spade_kernel<T, V, 2> : spade_kernel<T, V, 1>, blocks_of(g),
               dim3(threads), 0, data<T>(x), data<float>(statistics), data<T>(gamma_beta), g,
               Divisor(W), static_cast<int>(W), slope, data<T>(y));
      },
      y, x, gamma_beta);
}

}  // namespace weft::ops::cuda
