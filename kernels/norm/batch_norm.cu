// Batch norm in parts, for statistics that ranks share. CPU twin src/ops/cpu/batch_norm.cpp, cases
// tests/kernels/batch_norm.cpp.
//
// Bound by memory, with v for one array of activations: sums v, apply 2 v (3 with a residual),
// backward 2 v + 3 v, with a residual 4 v + 3 v (its gradient is written on the way), one more
// where it adds. Sums are of x - x at the first position: nothing cancels in f32. Chunks of
// positions are added in f64, in order: no atomics. Scratch: 2 C f32 for each of at most 512
// chunks.
#include "ops/norm.h"

#include "channels.cuh"

namespace weft::kernels {
namespace {

using ops::ActivationRange;

template <int V>
Grid rows_of(const Tensor& x) {
  const std::int64_t C = x.dim(-1);
  return grid_of<V>(x.view({1, x.numel() / C, C}), static_cast<int>(C));
}

template <class T>
__global__ void __launch_bounds__(32 * sum_warps)
    add_sums_kernel(const float* partial, const T* x, Grid g, double* sums) {
  const std::int64_t c = static_cast<std::int64_t>(blockIdx.x) * 32 + threadIdx.x % 32;
  double totals[2];
  add_chunks(partial, g.chunks, g.C, c, totals);
  if (threadIdx.x >= 32 || c >= g.C) return;
  const double count = static_cast<double>(g.P), pivot = g.P > 0 ? to_float(x[c]) : 0.0f;
  sums[c] = totals[0] + count * pivot;
  sums[g.C + c] = totals[1] + pivot * (2.0 * totals[0] + count * pivot);
  if (c == 0) sums[2 * g.C] = count;
}

__global__ void __launch_bounds__(32 * sum_warps)
    add_gradient_sums_kernel(const float* partial, Grid g, double* sums, float* dgamma,
                             float* dbeta) {
  const std::int64_t c = static_cast<std::int64_t>(blockIdx.x) * 32 + threadIdx.x % 32;
  double totals[2];
  add_chunks(partial, g.chunks, g.C, c, totals);
  if (threadIdx.x >= 32 || c >= g.C) return;
  sums[c] = totals[0];
  sums[g.C + c] = totals[1];
  if (dbeta != nullptr) dbeta[c] += static_cast<float>(totals[0]);
  if (dgamma != nullptr) dgamma[c] += static_cast<float>(totals[1]);
}

// The running statistics; mean may be null.
struct Running {
  float *mean, *var, *tmp_mean, *tmp_var, *iter;
};

// One block, which walks over the channels: all of them need the old count of iterations.
__global__ void batch_norm_statistics_kernel(const double* sums, std::int64_t C, bool synchronised,
                                             float eps, float momentum, float* stats, Running to) {
  const double count = sums[2 * C], floor = eps;
  const float keep = 1.0f - momentum;
  const bool counts = to.mean != nullptr && synchronised;
  const float iterations = counts ? keep * *to.iter + 1.0f : 1.0f;
  __syncthreads();
  if (counts && threadIdx.x == 0) *to.iter = iterations;
  for (std::int64_t c = threadIdx.x; c < C; c += threads) {
    const double mean = sums[c] / count, rest = sums[C + c] - sums[c] * mean;
    const double squares = rest < 0.0 ? 0.0 : rest, var = squares / count;
    const bool clamped = synchronised && var < floor;
    const float inverse = static_cast<float>(1.0 / count), m = static_cast<float>(mean);
    stats[c] = m;
    stats[C + c] = static_cast<float>(1.0 / sqrt(clamped        ? floor
                                                 : synchronised ? var
                                                                : var + floor));
    stats[2 * C + c] = inverse;
    stats[3 * C + c] = clamped ? 0.0f : inverse;
    if (to.mean == nullptr) continue;
    const float unbiased = static_cast<float>(squares / (count > 2.0 ? count - 1.0 : 1.0));
    if (synchronised) {
      to.tmp_mean[c] = keep * to.tmp_mean[c] + m;
      to.tmp_var[c] = keep * to.tmp_var[c] + unbiased;
      to.mean[c] = to.tmp_mean[c] / iterations;
      to.var[c] = to.tmp_var[c] / iterations;
    } else {
      to.mean[c] = keep * to.mean[c] + momentum * m;
      to.var[c] = keep * to.var[c] + momentum * unbiased;
    }
  }
}

__global__ void running_statistics_kernel(const float* mean, const float* var, std::int64_t C,
                                          float eps, float* stats) {
  const std::int64_t c = thread_index();
  if (c >= C) return;
  stats[c] = mean[c];
  stats[C + c] = 1.0f / sqrtf(var[c] + eps);
  stats[2 * C + c] = stats[3 * C + c] = 0.0f;
}

// (x - mean) scale + beta of V channels, as the forward and the backward both compute it.
template <int V>
struct Affine {
  float mean[V], scale[V], beta[V];
  __device__ __forceinline__ void load(const float* stats, const float* gamma, const float* b,
                                       std::int64_t C, std::int64_t first) {
#pragma unroll
    for (int k = 0; k < V; ++k) {
      mean[k] = stats[first + k];
      scale[k] = stats[C + first + k] * gamma[first + k];
      beta[k] = b[first + k];
    }
  }
  __device__ __forceinline__ float operator()(float x, int k) const {
    return (x - mean[k]) * scale[k] + beta[k];
  }
};

struct Parameters {
  const float *stats, *gamma, *beta;
};

enum class Residual { none, plain, normalised };

template <class T, int V, Residual kind>
__global__ void __launch_bounds__(threads)
    apply_kernel(const T* x, Parameters own, const T* residual, Parameters other,
                 ActivationRange range, Grid g, T* y) {
  const Place p = place(g);
  if (!p.active) return;
  const std::int64_t first = static_cast<std::int64_t>(p.pack) * V;
  Affine<V> mine, theirs;
  mine.load(own.stats, own.gamma, own.beta, g.C, first);
  if constexpr (kind == Residual::normalised)
    theirs.load(other.stats, other.gamma, other.beta, g.C, first);
#pragma unroll 4
  for (std::int64_t r = p.row; r < p.last; r += p.step) {
    const std::int64_t at = r * g.packs + p.pack;
    float v[V], add[V] = {};
    unpack(load_vec<V>(x, at), v);
    if constexpr (kind != Residual::none) unpack(load_vec<V>(residual, at), add);
#pragma unroll
    for (int k = 0; k < V; ++k) {
      float u = mine(v[k], k);
      if constexpr (kind == Residual::plain) u += add[k];
      if constexpr (kind == Residual::normalised) u += theirs(add[k], k);
      v[k] = u < range.low ? range.low : u > range.high ? range.high : u;
    }
    store_vec<V>(y, at, pack<T, V>(v));
  }
}

// 0 where the activation stops the gradient; written so that a NaN in u lets it through.
__device__ __forceinline__ float passed(float g, float u, ActivationRange range) {
  return u <= range.low || u >= range.high ? 0.0f : g;
}

// With y, dy becomes what it lets through.
template <class T, int V, bool with_y>
__global__ void __launch_bounds__(threads)
    batch_norm_gradient_sums_kernel(const T* x, Parameters own, ActivationRange range, const T* y,
                                    T* dy, Grid g, float* partial) {
  const Place p = place(g);
  float sums[2][V] = {};
  if (p.active) {
    const std::int64_t first = static_cast<std::int64_t>(p.pack) * V;
    Affine<V> mine;
    mine.load(own.stats, own.gamma, own.beta, g.C, first);
    float rstd[V];
#pragma unroll
    for (int k = 0; k < V; ++k) rstd[k] = own.stats[g.C + first + k];
#pragma unroll 2
    for (std::int64_t r = p.row; r < p.last; r += p.step) {
      const std::int64_t at = r * g.packs + p.pack;
      float v[V], d[V], out[V];
      unpack(load_vec<V>(x, at), v);
      unpack(load_vec<V>(static_cast<const T*>(dy), at), d);
      if constexpr (with_y) unpack(load_vec<V>(y, at), out);
#pragma unroll
      for (int k = 0; k < V; ++k) {
        if constexpr (with_y)
          d[k] = passed(d[k], out[k], range);
        else
          d[k] = passed(d[k], mine(v[k], k), range);
        sums[0][k] += d[k];
        sums[1][k] += d[k] * ((v[k] - mine.mean[k]) * rstd[k]);
      }
      if constexpr (with_y) store_vec<V>(dy, at, pack<T, V>(d));
    }
  }
  store_sums(g, sums, partial);
}

template <class T, int V>
__global__ void __launch_bounds__(threads)
    batch_norm_backward_kernel(const T* x, Parameters own, ActivationRange range, const T* dy,
                               const double* sums, Grid g, T* dx, bool accumulate) {
  const Place p = place(g);
  if (!p.active) return;
  const std::int64_t first = static_cast<std::int64_t>(p.pack) * V;
  Affine<V> mine;
  mine.load(own.stats, own.gamma, own.beta, g.C, first);
  float slope[V], shift[V];  // dx = scale g + slope (x - mean) + shift
#pragma unroll
  for (int k = 0; k < V; ++k) {
    const std::int64_t c = first + k;
    const float* const s = own.stats;
    shift[k] = -mine.scale[k] * static_cast<float>(s[2 * g.C + c] * sums[c]);
    slope[k] = -mine.scale[k] * s[g.C + c] * static_cast<float>(s[3 * g.C + c] * sums[g.C + c]);
  }
#pragma unroll 2
  for (std::int64_t r = p.row; r < p.last; r += p.step) {
    const std::int64_t at = r * g.packs + p.pack;
    float v[V], d[V], old[V] = {};
    unpack(load_vec<V>(x, at), v);
    unpack(load_vec<V>(dy, at), d);
    if (accumulate) unpack(load_vec<V>(static_cast<const T*>(dx), at), old);
#pragma unroll
    for (int k = 0; k < V; ++k)
      v[k] = old[k] + mine.scale[k] * passed(d[k], mine(v[k], k), range) +
             (slope[k] * (v[k] - mine.mean[k]) + shift[k]);
    store_vec<V>(dx, at, pack<T, V>(v));
  }
}

Parameters parameters_of(const Tensor& stats, const Tensor& gamma, const Tensor& beta) {
  return {data_or_null<float>(stats), data_or_null<float>(gamma), data_or_null<float>(beta)};
}

// The chunks are those that a dry run plans for.
Tensor partial_sums(const Tensor& x, const Grid& g) {
  WEFT_ASSERT(g.chunks == ops::batch_norm_pieces(x).count);
  return g.chunks > 0 ? Tensor::empty({g.chunks, 2, g.C}, DType::f32) : Tensor();
}

template <class... P, class... A>
void launch_addition(void (*kernel)(P...), std::int64_t C, A&&... args) {
  launch(kernel, dim3(blocks_for(C, 32)), dim3(32 * sum_warps), 2 * 32 * sum_warps * sizeof(double),
         std::forward<A>(args)...);
}

}  // namespace
}  // namespace weft::kernels

namespace weft::ops::cuda {

using namespace kernels;  // NOLINT: the operations are written in the kernels' words

void batch_norm_sums(const Tensor& x, Tensor& sums) {
  by_access(
      x.dim(-1),
      [&]<class T, int V>() {
        const Grid g = rows_of<V>(x);
        const Tensor partial = partial_sums(x, g);
        launch(moments_kernel<T, V>, blocks_of(g), dim3(threads), shared_of<V>(g), data<T>(x), g,
               data_or_null<float>(partial));
        launch_addition(add_sums_kernel<T>, g.C, data_or_null<float>(partial), data<T>(x), g,
                        data<double>(sums));
      },
      x);
}

void batch_norm_statistics(const Tensor& sums, BatchNormForm form, float eps, float momentum,
                           Tensor& stats, Tensor& running_mean, Tensor& running_var,
                           Tensor& tmp_mean, Tensor& tmp_var, Tensor& iter) {
  const Running to{data_or_null<float>(running_mean), data_or_null<float>(running_var),
                   data_or_null<float>(tmp_mean), data_or_null<float>(tmp_var),
                   data_or_null<float>(iter)};
  launch(batch_norm_statistics_kernel, dim3(1), dim3(threads), 0, data<double>(sums), stats.dim(-1),
         form == BatchNormForm::synchronised, eps, momentum, data<float>(stats), to);
}

void batch_norm_running_statistics(const Tensor& running_mean, const Tensor& running_var, float eps,
                                   Tensor& stats) {
  launch_threads(running_statistics_kernel, stats.dim(-1), data<float>(running_mean),
                 data<float>(running_var), stats.dim(-1), eps, data<float>(stats));
}

void batch_norm_apply(const Tensor& x, const Tensor& stats, const Tensor& gamma, const Tensor& beta,
                      const Tensor& residual, const Tensor& residual_stats,
                      const Tensor& residual_gamma, const Tensor& residual_beta, Activation act,
                      Tensor& y) {
  by_access(
      x.dim(-1),
      [&]<class T, int V>() {
        const Grid g = rows_of<V>(x);
        const auto run = [&]<Residual kind>() {
          launch(apply_kernel<T, V, kind>, blocks_of(g), dim3(threads), 0, data<T>(x),
                 parameters_of(stats, gamma, beta), data_or_null<T>(residual),
                 parameters_of(residual_stats, residual_gamma, residual_beta), range_of(act), g,
                 data<T>(y));
        };
        if (!residual.defined())
          run.template operator()<Residual::none>();
        else if (!residual_stats.defined())
          run.template operator()<Residual::plain>();
        else
          run.template operator()<Residual::normalised>();
      },
      x, residual, y);
}

void batch_norm_backward_sums(const Tensor& x, const Tensor& stats, const Tensor& gamma,
                              const Tensor& beta, Activation act, const Tensor& y, Tensor& dy,
                              Tensor& sums, Tensor& dgamma, Tensor& dbeta) {
  by_access(
      x.dim(-1),
      [&]<class T, int V>() {
        const Grid g = rows_of<V>(x);
        const Tensor partial = partial_sums(x, g);
        const auto run = [&]<bool with_y>() {
          launch(batch_norm_gradient_sums_kernel<T, V, with_y>, blocks_of(g), dim3(threads),
                 shared_of<V>(g), data<T>(x), parameters_of(stats, gamma, beta), range_of(act),
                 data_or_null<T>(y), data<T>(dy), g, data_or_null<float>(partial));
        };
        if (y.defined())
          run.template operator()<true>();
        else
          run.template operator()<false>();
        launch_addition(add_gradient_sums_kernel, g.C, data_or_null<float>(partial), g,
                        data<double>(sums), data_or_null<float>(dgamma),
                        data_or_null<float>(dbeta));
      },
      x, y, dy);
}

void batch_norm_backward(const Tensor& x, const Tensor& stats, const Tensor& gamma,
                         const Tensor& beta, Activation act, const Tensor& dy, const Tensor& sums,
                         Tensor& dx, bool accumulate) {
  by_access(
      x.dim(-1),
      [&]<class T, int V>() {
        const Grid g = rows_of<V>(x);
        launch(batch_norm_backward_kernel<T, V>, blocks_of(g), dim3(threads), 0, data<T>(x),
               parameters_of(stats, gamma, beta), range_of(act), data<T>(dy), data<double>(sums), g,
               data<T>(dx), accumulate);
      },
      x, dy, dx);
}

}  // namespace weft::ops::cuda
