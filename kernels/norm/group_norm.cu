// GroupNorm with SiLU behind it, over channels-last frames. CPU twin src/ops/cpu/group_norm.cpp,
// cases tests/kernels/norm.cpp.
//
// Bound by memory: v is one activation. forward 3 v (read for the statistics, read and written for
// the result; a sample of 512 x 8 x 8 and the like stays in L2 between the two), backward 5 v (x
// and dy twice, dx), one more where it adds. A thread keeps 16 bytes of channels and walks down the
// positions, so that everything per channel stays in its registers and a warp's accesses are whole
// lines. Groups appear only where a few numbers a channel are put together.
//
// Sums of x are taken of x - x at the sample's first position, channel by channel: what is left is
// of the size of the deviation, whatever the mean, and nothing cancels. Chunks of positions depend
// on the shape alone and their sums are added in their order: no atomics. Scratch: 2 C f32, in
// batch_norm_tangent_backward 5 C, for each of at most 512 chunks a sample.
#include "ops/norm.h"

#include "channels.cuh"
#include "math.cuh"

namespace weft::kernels {
namespace {

// sums [N,columns] = the chunks' partial sums, in order. A warp takes every eighth chunk of 32
// columns.
__global__ void __launch_bounds__(32 * sum_warps)
    add_chunks_kernel(const float* partial, std::int64_t chunks, std::int64_t columns,
                      float* sums) {
  float* const shared = shared_memory<float>();  // [warps][32]
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const std::int64_t column = static_cast<std::int64_t>(blockIdx.x) * 32 + lane;
  const float* const from = partial + blockIdx.y * chunks * columns;
  float sum = 0.0f;
  if (column < columns)
#pragma unroll 8
    for (std::int64_t chunk = warp; chunk < chunks; chunk += sum_warps)
      sum += from[chunk * columns + column];
  shared[threadIdx.x] = sum;
  __syncthreads();
  if (warp == 0 && column < columns) {
    for (int w = 1; w < sum_warps; ++w) sum += shared[w * 32 + lane];
    sums[blockIdx.y * columns + column] = sum;
  }
}

// stats [N,groups,2] of the channels' sums: first the mean of all, then the channels' own
// deviations and those of their means from it.
template <class T>
__global__ void group_norm_statistics_kernel(const T* x, const float* sums, Grid g, float eps,
                                             float* stats) {
  const std::int64_t i = thread_index();
  if (i >= g.N * g.groups) return;
  const std::int64_t n = i / g.groups, first = i % g.groups * g.group_size();
  const float *sum = sums + n * 2 * g.C, *squares = sum + g.C;
  const T* const base = x + n * g.P * g.C;
  const float count = static_cast<float>(g.P);
  double mean = 0.0;
  for (std::int64_t c = first; c < first + g.group_size(); ++c)
    mean += to_float(base[c]) + sum[c] / count;
  mean /= static_cast<double>(g.group_size());
  double squared = 0.0;
  for (std::int64_t c = first; c < first + g.group_size(); ++c) {
    const double own = sum[c] / count, off = to_float(base[c]) + own - mean;
    squared += squares[c] / count - own * own + off * off;
  }
  const double variance = squared / static_cast<double>(g.group_size());
  stats[2 * i] = static_cast<float>(mean);
  stats[2 * i + 1] = static_cast<float>(1.0 / sqrt((variance > 0.0 ? variance : 0.0) + eps));
}

// What a thread's channels are normalised with.
template <int V>
struct Channels {
  float mean[V], rstd[V], gamma[V], beta[V];
  __device__ __forceinline__ Channels(const Grid& g, const Place& p, const float* stats,
                                      const float* ga, const float* be) {
#pragma unroll
    for (int k = 0; k < V; ++k) {
      const unsigned c = static_cast<unsigned>(p.pack * V + k);
      const float* const s = stats + g.of_group(p.sample, c);
      mean[k] = s[0];
      rstd[k] = s[1];
      gamma[k] = ga[c];
      beta[k] = be[c];
    }
  }
};

template <class T, int V, bool silu>
__global__ void __launch_bounds__(threads)
    group_norm_forward_kernel(const T* x, const float* stats, const float* gamma, const float* beta,
                              Grid g, T* y) {
  const Place p = place(g);
  if (!p.active) return;
  const Channels<V> with(g, p, stats, gamma, beta);
#pragma unroll 4
  for (std::int64_t r = p.row; r < p.last; r += p.step) {
    const std::int64_t at = (p.sample * g.P + r) * g.packs + p.pack;
    float v[V];
    unpack(load_vec<V>(x, at), v);
#pragma unroll
    for (int k = 0; k < V; ++k) {
      const float z = (v[k] - with.mean[k]) * with.rstd[k] * with.gamma[k] + with.beta[k];
      v[k] = silu ? z * sigmoid(z) : z;
    }
    store_vec<V>(y, at, pack<T, V>(v));
  }
}

// The gradient before gamma: dy, times SiLU's slope at z.
template <bool silu>
__device__ __forceinline__ float behind(float dy, float normalised, float gamma, float beta) {
  if constexpr (!silu) return dy;
  const float z = normalised * gamma + beta, s = sigmoid(z);
  return dy * s * (1.0f + z * (1.0f - s));
}

// Sums of g and of g times the normalised x.
template <class T, int V, bool silu>
__global__ void __launch_bounds__(threads)
    group_norm_gradient_sums_kernel(const T* x, const T* dy, const float* stats, const float* gamma,
                                    const float* beta, Grid g, float* partial) {
  const Place p = place(g);
  float sums[2][V] = {};
  if (p.active) {
    const Channels<V> with(g, p, stats, gamma, beta);
#pragma unroll 2
    for (std::int64_t r = p.row; r < p.last; r += p.step) {
      const std::int64_t at = (p.sample * g.P + r) * g.packs + p.pack;
      float v[V], d[V];
      unpack(load_vec<V>(x, at), v);
      unpack(load_vec<V>(dy, at), d);
#pragma unroll
      for (int k = 0; k < V; ++k) {
        const float h = (v[k] - with.mean[k]) * with.rstd[k];
        const float b = behind<silu>(d[k], h, with.gamma[k], with.beta[k]);
        sums[0][k] += b;
        sums[1][k] += b * h;
      }
    }
  }
  store_sums(g, sums, partial);
}

// means [N,groups,2] over a group of g gamma and of g gamma times the normalised x.
__global__ void gradient_means_kernel(const float* sums, const float* gamma, Grid g, float* means) {
  const std::int64_t i = thread_index();
  if (i >= g.N * g.groups) return;
  const std::int64_t n = i / g.groups, first = i % g.groups * g.group_size();
  const float* const sum = sums + n * 2 * g.C;
  float a = 0.0f, b = 0.0f;
  for (std::int64_t c = first; c < first + g.group_size(); ++c) {
    a += sum[c] * gamma[c];
    b += sum[g.C + c] * gamma[c];
  }
  const float count = static_cast<float>(g.P * g.group_size());
  means[2 * i] = a / count;
  means[2 * i + 1] = b / count;
}

__global__ void weight_gradients_kernel(const float* sums, Grid g, float* dgamma, float* dbeta) {
  const std::int64_t c = thread_index();
  if (c >= g.C) return;
  float a = 0.0f, b = 0.0f;
  for (std::int64_t n = 0; n < g.N; ++n) {
    a += sums[n * 2 * g.C + c];
    b += sums[(n * 2 + 1) * g.C + c];
  }
  dbeta[c] += a;
  dgamma[c] += b;
}

template <class T, int V, bool silu>
__global__ void __launch_bounds__(threads)
    group_norm_backward_kernel(const T* x, const T* dy, const float* stats, const float* means,
                               const float* gamma, const float* beta, Grid g, T* dx,
                               bool accumulate) {
  const Place p = place(g);
  if (!p.active) return;
  const Channels<V> with(g, p, stats, gamma, beta);
  float mean_g[V], mean_gx[V];
#pragma unroll
  for (int k = 0; k < V; ++k) {
    const float* const m = means + g.of_group(p.sample, static_cast<unsigned>(p.pack * V + k));
    mean_g[k] = m[0];
    mean_gx[k] = m[1];
  }
#pragma unroll 2
  for (std::int64_t r = p.row; r < p.last; r += p.step) {
    const std::int64_t at = (p.sample * g.P + r) * g.packs + p.pack;
    float v[V], d[V], old[V] = {};
    unpack(load_vec<V>(x, at), v);
    unpack(load_vec<V>(dy, at), d);
    if (accumulate) unpack(load_vec<V>(static_cast<const T*>(dx), at), old);
#pragma unroll
    for (int k = 0; k < V; ++k) {
      const float h = (v[k] - with.mean[k]) * with.rstd[k];
      const float b = behind<silu>(d[k], h, with.gamma[k], with.beta[k]) * with.gamma[k];
      v[k] = old[k] + with.rstd[k] * (b - mean_g[k] - h * mean_gx[k]);
    }
    store_vec<V>(dx, at, pack<T, V>(v));
  }
}

// What batch_norm_tangent_backward sums a channel, with h the normalised x: a, b, a b, a h, b h.
constexpr int tangent_sums = 5;
template <class T, int V>
__global__ void __launch_bounds__(threads)
    tangent_sums_kernel(const T* x, const T* dyt, const T* tangent, const float* stats, Grid g,
                        float* partial) {
  const Place p = place(g);
  float sums[tangent_sums][V] = {};
  if (p.active)
    for (std::int64_t r = p.row; r < p.last; r += p.step) {
      const std::int64_t at = r * g.packs + p.pack;
      float v[V], a[V], b[V];
      unpack(load_vec<V>(x, at), v);
      unpack(load_vec<V>(dyt, at), a);
      unpack(load_vec<V>(tangent, at), b);
#pragma unroll
      for (int k = 0; k < V; ++k) {
        const float* const s = stats + 2 * (static_cast<std::int64_t>(p.pack) * V + k);
        const float h = (v[k] - s[0]) * s[1];
        sums[0][k] += a[k];
        sums[1][k] += b[k];
        sums[2][k] += a[k] * b[k];
        sums[3][k] += a[k] * h;
        sums[4][k] += b[k] * h;
      }
    }
  store_sums(g, sums, partial);
}

// linear [4,C]: what dx is of h, a, b and 1 (the formula stands at the CPU side).
__global__ void tangent_factors_kernel(const float* sums, const float* stats, const float* gamma,
                                       Grid g, float* linear, float* dgamma) {
  const std::int64_t c = thread_index();
  if (c >= g.C) return;
  const double n = static_cast<double>(g.P), rstd = stats[2 * c + 1];
  const double a = sums[c] / n, b = sums[g.C + c] / n, p = sums[3 * g.C + c] / n,
               q = sums[4 * g.C + c] / n;
  const double r = sums[2 * g.C + c] / n - a * b - p * q, scale = -gamma[c] * rstd * rstd;
  linear[c] = static_cast<float>(scale * (r - 2.0 * p * q));
  linear[g.C + c] = static_cast<float>(scale * q);
  linear[2 * g.C + c] = static_cast<float>(scale * p);
  linear[3 * g.C + c] = static_cast<float>(-scale * (q * a + p * b));
  if (dgamma != nullptr) dgamma[c] += static_cast<float>(n * rstd * r);
}

template <class T, int V>
__global__ void __launch_bounds__(threads)
    tangent_backward_kernel(const T* x, const T* dyt, const T* tangent, const float* stats,
                            const float* linear, Grid g, T* dx, bool accumulate) {
  const Place p = place(g);
  if (!p.active) return;
  for (std::int64_t r = p.row; r < p.last; r += p.step) {
    const std::int64_t at = r * g.packs + p.pack;
    float v[V], a[V], b[V], old[V] = {};
    unpack(load_vec<V>(x, at), v);
    unpack(load_vec<V>(dyt, at), a);
    unpack(load_vec<V>(tangent, at), b);
    if (accumulate) unpack(load_vec<V>(static_cast<const T*>(dx), at), old);
#pragma unroll
    for (int k = 0; k < V; ++k) {
      const std::int64_t c = static_cast<std::int64_t>(p.pack) * V + k;
      const float h = (v[k] - stats[2 * c]) * stats[2 * c + 1];
      v[k] = old[k] + linear[c] * h + linear[g.C + c] * a[k] + linear[2 * g.C + c] * b[k] +
             linear[3 * g.C + c];
    }
    store_vec<V>(dx, at, pack<T, V>(v));
  }
}

// partial [N * chunks, values, C].
Tensor sums_of_chunks(const Tensor& partial, const Grid& g) {
  const std::int64_t columns = partial.dim(1) * g.C;
  const Tensor sums = Tensor::empty({g.N, partial.dim(1), g.C}, DType::f32);
  launch(add_chunks_kernel, dim3(blocks_for(columns, 32), static_cast<unsigned>(g.N)),
         dim3(32 * sum_warps), 32 * sum_warps * sizeof(float), data<float>(partial), g.chunks,
         columns, data<float>(sums));
  return sums;
}

// Calls f.operator()<T, V, silu>().
template <class F, class... Tensors>
void by_instance(bool silu, F&& f, const Tensor& x, const Tensors&... rest) {
  by_access(
      x.dim(-1),
      [&]<class T, int V>() {
        if (silu)
          f.template operator()<T, V, true>();
        else
          f.template operator()<T, V, false>();
      },
      x, rest...);
}

}  // namespace
}  // namespace weft::kernels

namespace weft::ops::cuda {

using namespace kernels;  // NOLINT: the operations are written in the kernels' words

void group_norm_forward(const Tensor& x, const Tensor& gamma, const Tensor& beta, int groups,
                        float eps, bool silu, Tensor& y, Tensor& stats) {
  if (x.numel() == 0) return;
  by_instance(
      silu,
      [&]<class T, int V, bool with_silu>() {
        const Grid g = grid_of<V>(x, groups);
        WEFT_ASSERT(g.C % groups == 0);
        const Tensor partial = Tensor::empty({g.N * g.chunks, 2, g.C}, DType::f32);
        launch(moments_kernel<T, V>, blocks_of(g), dim3(threads), shared_of<V>(g), data<T>(x), g,
               data<float>(partial));
        const Tensor sums = sums_of_chunks(partial, g);
        launch_threads(group_norm_statistics_kernel<T>, g.N * g.groups, data<T>(x),
                       data<float>(sums), g, eps, data<float>(stats));
        launch(group_norm_forward_kernel<T, V, with_silu>, blocks_of(g), dim3(threads), 0,
               data<T>(x), data<float>(stats), data<float>(gamma), data<float>(beta), g,
               data<T>(y));
      },
      x, y);
}

void group_norm_backward(const Tensor& x, const Tensor& gamma, const Tensor& beta,
                         const Tensor& stats, int groups, bool silu, const Tensor& dy, Tensor& dx,
                         bool accumulate, Tensor& dgamma, Tensor& dbeta) {
  if (x.numel() == 0) return;
  by_instance(
      silu,
      [&]<class T, int V, bool with_silu>() {
        const Grid g = grid_of<V>(x, groups);
        const Tensor partial = Tensor::empty({g.N * g.chunks, 2, g.C}, DType::f32);
        const Tensor means = Tensor::empty({g.N, g.groups, 2}, DType::f32);
        launch(group_norm_gradient_sums_kernel<T, V, with_silu>, blocks_of(g), dim3(threads),
               shared_of<V>(g), data<T>(x), data<T>(dy), data<float>(stats), data<float>(gamma),
               data<float>(beta), g, data<float>(partial));
        const Tensor sums = sums_of_chunks(partial, g);
        launch_threads(gradient_means_kernel, g.N * g.groups, data<float>(sums), data<float>(gamma),
                       g, data<float>(means));
        if (dgamma.defined())
          launch_threads(weight_gradients_kernel, g.C, data<float>(sums), g, data<float>(dgamma),
                         data<float>(dbeta));
        launch(group_norm_backward_kernel<T, V, with_silu>, blocks_of(g), dim3(threads), 0,
               data<T>(x), data<T>(dy), data<float>(stats), data<float>(means), data<float>(gamma),
               data<float>(beta), g, data<T>(dx), accumulate);
      },
      x, dy, dx);
}

void batch_norm_tangent_backward(const Tensor& x, const Tensor& gamma, const Tensor& stats,
                                 const Tensor& tangent, const Tensor& dyt, Tensor& dx,
                                 bool accumulate, Tensor& dgamma) {
  if (x.numel() == 0) return;
  WEFT_ASSERT(x.dim(0) == 1);
  by_instance(
      false,
      [&]<class T, int V, bool>() {
        const Grid g = grid_of<V>(x, static_cast<int>(x.dim(-1)));
        const Tensor partial = Tensor::empty({g.chunks, tangent_sums, g.C}, DType::f32);
        const Tensor linear = Tensor::empty({4, g.C}, DType::f32);
        launch(tangent_sums_kernel<T, V>, blocks_of(g), dim3(threads),
               shared_of<V>(g, tangent_sums), data<T>(x), data<T>(dyt), data<T>(tangent),
               data<float>(stats), g, data<float>(partial));
        const Tensor sums = sums_of_chunks(partial, g);
        launch_threads(tangent_factors_kernel, g.C, data<float>(sums), data<float>(stats),
                       data<float>(gamma), g, data<float>(linear), data_or_null<float>(dgamma));
        launch(tangent_backward_kernel<T, V>, blocks_of(g), dim3(threads), 0, data<T>(x),
               data<T>(dyt), data<T>(tangent), data<float>(stats), data<float>(linear), g,
               data<T>(dx), accumulate);
      },
      x, tangent, dyt, dx);
}

}  // namespace weft::ops::cuda
