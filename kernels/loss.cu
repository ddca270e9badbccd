// CUDA side of ops/loss.h; LPIPS in loss_lpips.cu. CPU twin: src/ops/cpu/loss.cpp; cases:
// tests/kernels/loss.cpp.
//
// Bound by memory: each operand read once, each gradient written once. Sums are made in two stages
// (loss_sums.cuh). The penalty reads a gradient of frames twice and
// writes it once; a frame's norm is a block's: frames are few, but the backward through the
// discriminator before it takes a hundred times as long.
#include "ops/loss.h"

#include <algorithm>

#include "divide.cuh"
#include "loss_sums.cuh"
#include "ops/random.h"

namespace weft::kernels {
namespace {

__global__ void adaptive_weight_kernel(const float* n, std::int64_t n_blocks, const float* g,
                                       std::int64_t g_blocks, float a, float* weight) {
  const double norm = sqrt(total_of(n, n_blocks)), other = sqrt(total_of(g, g_blocks));
  if (threadIdx.x == 0) {
    const double ratio = norm / (other + 1e-4);
    weight[0] = a * static_cast<float>(ratio < 1e4 ? ratio : 1e4);
  }
}

// Functions of V neighbouring elements: their sum.

template <int V, class A, class B>
struct Difference {
  const A* a;
  const B* b;
  __device__ float operator()(std::int64_t i) const {
    float x[V], y[V], sum = 0.0f;
    unpack(load_vec<V>(a, i), x);
    unpack(load_vec<V>(b, i), y);
#pragma unroll
    for (int e = 0; e < V; ++e) sum += fabsf(x[e] - y[e]);
    return sum;
  }
};

// The means and, C behind them, the log variances of moments [.., 2 C]; C in accesses.
struct Moments {
  Divisor C;
  std::int64_t variances;
  __device__ __forceinline__ std::int64_t means(std::int64_t i) const {
    return i + C.divide(static_cast<unsigned>(i)) * variances;
  }
};

template <int V, class T>
struct Divergence {
  const T* moments;
  Moments at;
  __device__ float operator()(std::int64_t i) const {
    const std::int64_t means = at.means(i);
    float mu[V], lv[V], sum = 0.0f;
    unpack(load_vec<V>(moments, means), mu);
    unpack(load_vec<V>(moments, means + at.variances), lv);
#pragma unroll
    for (int e = 0; e < V; ++e) {
      const float v = fminf(fmaxf(lv[e], ops::lowest_log_variance), ops::highest_log_variance);
      sum += 0.5f * (mu[e] * mu[e] + expm1f(v) - v);
    }
    return sum;
  }
};

template <class T>
struct Gan {
  const T* x;
  ops::GanLoss kind;
  float sign;
  __device__ float operator()(std::int64_t i) const {
    const float v = sign * to_float(x[i]);
    if (kind == ops::GanLoss::linear) return v;
    if (kind == ops::GanLoss::hinge) return fmaxf(0.0f, 1.0f + v);
    return fmaxf(v, 0.0f) + log1pf(expf(-fabsf(v)));
  }
};

struct Square {
  const float* x;
  __device__ float operator()(std::int64_t i) const { return x[i] * x[i]; }
};

// V elements at access i become v, or are added to.
template <int V, class T>
__device__ __forceinline__ void put(T* to, std::int64_t i, float (&v)[V], bool accumulate) {
  if (accumulate) {
    float before[V];
    unpack(load_vec<V>(static_cast<const T*>(to), i), before);
#pragma unroll
    for (int e = 0; e < V; ++e) v[e] += before[e];
  }
  store_vec<V>(to, i, pack<T, V>(v));
}

template <int V, class A, class B>
__global__ void __launch_bounds__(threads)
    l1_backward_kernel(const A* a, const B* b, float weight, A* da, bool accumulate,
                       std::int64_t count) {
  const std::int64_t i = thread_index();
  if (i >= count) return;
  float x[V], y[V];
  unpack(load_vec<V>(a, i), x);
  unpack(load_vec<V>(b, i), y);
#pragma unroll
  for (int e = 0; e < V; ++e) {
    const float d = x[e] - y[e];
    x[e] = d > 0.0f ? weight : d < 0.0f ? -weight : 0.0f;
  }
  put(da, i, x, accumulate);
}

template <int V, class T>
__global__ void __launch_bounds__(threads)
    kl_backward_kernel(const T* moments, Moments at, float weight, T* dmoments, bool accumulate,
                       std::int64_t count) {
  const std::int64_t i = thread_index();
  if (i >= count) return;
  const std::int64_t means = at.means(i);
  float mu[V], lv[V];
  unpack(load_vec<V>(moments, means), mu);
  unpack(load_vec<V>(moments, means + at.variances), lv);
#pragma unroll
  for (int e = 0; e < V; ++e) {
    mu[e] *= weight;
    lv[e] = lv[e] < ops::lowest_log_variance || lv[e] > ops::highest_log_variance
                ? 0.0f
                : weight * 0.5f * expm1f(lv[e]);
  }
  put(dmoments, means, mu, accumulate);
  put(dmoments, means + at.variances, lv, accumulate);
}

template <int V, class T>
__global__ void __launch_bounds__(threads)
    gan_backward_kernel(const T* x, ops::GanLoss kind, float sign, float scale, T* dx,
                        bool accumulate, std::int64_t count) {
  const std::int64_t i = thread_index();
  if (i >= count) return;
  float v[V];
  unpack(load_vec<V>(x, i), v);
#pragma unroll
  for (int e = 0; e < V; ++e) {
    const float s = sign * v[e];
    v[e] = scale;
    if (kind == ops::GanLoss::hinge && 1.0f + s <= 0.0f) v[e] = 0.0f;
    if (kind == ops::GanLoss::logistic) v[e] = scale / (1.0f + expf(-s));
  }
  put(dx, i, v, accumulate);
}

Moments moments_of(const Tensor& moments, int V) {
  const std::int64_t C = moments.dim(-1) / 2 / V;
  WEFT_ASSERT(moments.numel() / 2 / V < std::int64_t{1} << 31);
  return {Divisor(C), C};
}

constexpr int norm_threads = 1024;

__global__ void lecam_kernel(const float* mean, const float* other, float sign, float weight,
                             float* loss, float* slope) {
  const float d = fmaxf(0.0f, sign * (mean[0] - other[0]));
  loss[0] += weight * d * d;
  slope[0] = 2.0f * sign * d;
}

template <class T>
__global__ void __launch_bounds__(norm_threads)
    frame_norms_kernel(const T* g, std::int64_t size, float* norms) {
  const T* const from = g + blockIdx.x * size;
  float sum = 0.0f;
  for (std::int64_t i = threadIdx.x; i < size; i += norm_threads) {
    const float v = to_float(from[i]);
    sum += v * v;
  }
  sum = block_sum(sum, shared_memory<float>());
  if (threadIdx.x == 0) norms[blockIdx.x] = sqrtf(sum);
}

__global__ void penalty_kernel(const float* norms, std::int64_t frames, float weight, float* loss) {
  double sum = 0.0;
  for (std::int64_t f = 0; f < frames; ++f) sum += (norms[f] - 1.0) * (norms[f] - 1.0);
  loss[0] += static_cast<float>(weight * sum / static_cast<double>(frames));
}

template <class T>
__global__ void penalty_backward_kernel(const T* g, const float* norms, std::int64_t size,
                                        float weight, T* dg, std::int64_t count) {
  const std::int64_t i = thread_index();
  if (i >= count) return;
  const float norm = norms[i / size];
  dg[i] = from_float<T>(norm > 0.0f ? weight * (norm - 1.0f) / norm * to_float(g[i]) : 0.0f);
}

}  // namespace
}  // namespace weft::kernels

namespace weft::ops::cuda {

using namespace kernels;  // NOLINT: the operations are written in the kernels' words

void l1_forward(const Tensor& a, const Tensor& b, float weight, Tensor& loss) {
  by_types(a, b, [&]<class A, class B>() {
    by_width<8>(
        a.numel(),
        [&]<int V>() {
          add_loss_sum<false>(Difference<V, A, B>{data<A>(a), data<B>(b)}, a.numel() / V,
                              least_items / V, weight, loss);
        },
        a, b);
  });
}

void l1_backward(const Tensor& a, const Tensor& b, float weight, Tensor& da, bool accumulate) {
  by_types(a, b, [&]<class A, class B>() {
    by_width<8>(
        a.numel(),
        [&]<int V>() {
          launch_items(l1_backward_kernel<V, A, B>, a.numel() / V, data<A>(a), data<B>(b), weight,
                       data<A>(da), accumulate);
        },
        a, b, da);
  });
}

void kl_forward(const Tensor& moments, float weight, Tensor& loss) {
  if (moments.numel() == 0) return;
  by_type(moments, [&]<class T>() {
    by_width<8>(
        moments.dim(-1) / 2,
        [&]<int V>() {
          add_loss_sum<false>(Divergence<V, T>{data<T>(moments), moments_of(moments, V)},
                              moments.numel() / 2 / V, least_items / V, weight, loss);
        },
        moments);
  });
}

void kl_backward(const Tensor& moments, float weight, Tensor& dmoments, bool accumulate) {
  if (moments.numel() == 0) return;
  by_type(moments, [&]<class T>() {
    by_width<8>(
        moments.dim(-1) / 2,
        [&]<int V>() {
          launch_items(kl_backward_kernel<V, T>, moments.numel() / 2 / V, data<T>(moments),
                       moments_of(moments, V), weight, data<T>(dmoments), accumulate);
        },
        moments, dmoments);
  });
}

void gan_loss_forward(const Tensor& x, GanLoss kind, float sign, float weight, Tensor& loss) {
  by_type(x, [&]<class T>() {
    add_loss_sum<false>(Gan<T>{data<T>(x), kind, sign}, x.numel(), least_items,
                        weight / static_cast<double>(x.numel()), loss);
  });
}

void gan_loss_backward(const Tensor& x, GanLoss kind, float sign, float weight, Tensor& dx,
                       bool accumulate) {
  by_type(x, [&]<class T>() {
    by_width<8>(
        x.numel(),
        [&]<int V>() {
          launch_items(gan_backward_kernel<V, T>, x.numel() / V, data<T>(x), kind, sign,
                       sign * weight / static_cast<float>(x.numel()), data<T>(dx), accumulate);
        },
        x, dx);
  });
}

void adaptive_weight(const Tensor& n, const Tensor& g, float a, Tensor& weight) {
  const Tensor of_n = partial_sums<false>(Square{data<float>(n)}, n.numel(), least_items),
               of_g = partial_sums<false>(Square{data<float>(g)}, g.numel(), least_items);
  launch(adaptive_weight_kernel, dim3(1), dim3(32), 0, data<float>(of_n), of_n.numel(),
         data<float>(of_g), of_g.numel(), a, data<float>(weight));
}

void lecam(const Tensor& mean, const Tensor& other, float sign, float weight, Tensor& loss,
           Tensor& slope) {
  launch(lecam_kernel, dim3(1), dim3(1), 0, data<float>(mean), data<float>(other), sign, weight,
         data<float>(loss), data<float>(slope));
}

void gradient_penalty_forward(const Tensor& g, float weight, Tensor& norms, Tensor& loss) {
  const std::int64_t F = g.dim(1);
  by_type(g, [&]<class T>() {
    launch(frame_norms_kernel<T>, dim3(static_cast<unsigned>(F)), dim3(norm_threads),
           32 * sizeof(float), data<T>(g), g.numel() / F, data<float>(norms));
  });
  launch(penalty_kernel, dim3(1), dim3(1), 0, data<float>(norms), F, weight, data<float>(loss));
}

void gradient_penalty_backward(const Tensor& g, const Tensor& norms, float weight, Tensor& dg) {
  const std::int64_t F = g.dim(1);
  by_type(g, [&]<class T>() {
    launch_items(penalty_backward_kernel<T>, g.numel(), data<T>(g), data<float>(norms),
                 g.numel() / F, 2.0f * weight / static_cast<float>(F), data<T>(dg));
  });
}

}  // namespace weft::ops::cuda
