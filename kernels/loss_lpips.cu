// LPIPS' distance of ops/loss.h. CPU twin: src/ops/cpu/loss.cpp; cases: tests/kernels/loss.cpp.
//
// Bound by memory: a position of C channels is read once, and again from L1 for its norms. 8, 16 or
// 32 lanes take a position, as many as its 16-byte accesses keep busy.
#include "loss_sums.cuh"
#include "ops/loss.h"

namespace weft::kernels {
namespace {

// Sum over `lanes` neighbouring lanes, to each of them.
template <int lanes>
__device__ __forceinline__ float group_sum(float x) {
#pragma unroll
  for (int offset = lanes / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(full_mask, x, offset);
  return x;
}

// 1 / (|a| + 1e-10) and the like of a position, by its lanes.
struct Norms {
  float of_a, of_b, norm_b;
};
// Calls f(c, a's, b's) for this lane's accesses c of the C of a position: V channels of both.
template <int lanes, int V, class T, class F>
__device__ __forceinline__ void each_access(const T* a, const T* b, int C, F&& f) {
#pragma unroll 2
  for (int c = threadIdx.x % lanes; c < C; c += lanes) {
    float x[V], y[V];
    unpack(load_vec<V>(a, c), x);
    unpack(load_vec<V>(b, c), y);
    f(c, x, y);
  }
}
template <int lanes, int V, class T>
__device__ __forceinline__ Norms norms_of(const T* a, const T* b, int C) {
  float aa = 0.0f, bb = 0.0f;
  each_access<lanes, V>(a, b, C, [&](int, const float(&x)[V], const float(&y)[V]) {
#pragma unroll
    for (int e = 0; e < V; ++e) {
      aa += x[e] * x[e];
      bb += y[e] * y[e];
    }
  });
  const float norm_b = sqrtf(group_sum<lanes>(bb));
  return {1.0f / (sqrtf(group_sum<lanes>(aa)) + 1e-10f), 1.0f / (norm_b + 1e-10f), norm_b};
}

// `of_position` lanes take a position; C in accesses of V.
template <int of_position, int V, class T>
struct Lpips {
  static constexpr int lanes = of_position;
  const T *a, *b;
  const float* w;
  int C;
  __device__ float operator()(std::int64_t p) const {
    const T *x = a + p * C * V, *y = b + p * C * V;
    const Norms n = norms_of<lanes, V>(x, y, C);
    float sum = 0.0f;
    each_access<lanes, V>(x, y, C, [&](int c, const float(&u)[V], const float(&v)[V]) {
      float weight[V];
      unpack(load_vec<V>(w, c), weight);
#pragma unroll
      for (int e = 0; e < V; ++e) {
        const float d = u[e] * n.of_a - v[e] * n.of_b;
        sum += weight[e] * d * d;
      }
    });
    return sum;
  }
};

// With g = the gradient of the normalised b: db = g / (|b| + e) - b (g b) / (|b| (|b| + e)^2).
template <int lanes, int V, class T>
__global__ void __launch_bounds__(threads)
    lpips_backward_kernel(const T* a, const T* b, const float* w, float scale, int C,
                          std::int64_t positions, T* db) {
  const std::int64_t own = thread_index() / lanes;
  const bool valid = own < positions;  // lanes without a position shuffle with the others
  const std::int64_t p = valid ? own : positions - 1;
  const T *x = a + p * C * V, *y = b + p * C * V;
  const Norms n = norms_of<lanes, V>(x, y, C);
  float along = 0.0f;
  const auto gradient = [&](int c, const float(&u)[V], const float(&v)[V], float(&g)[V]) {
    unpack(load_vec<V>(w, c), g);
#pragma unroll
    for (int e = 0; e < V; ++e) g[e] = scale * g[e] * (u[e] * n.of_a - v[e] * n.of_b);
  };
  each_access<lanes, V>(x, y, C, [&](int c, const float(&u)[V], const float(&v)[V]) {
    float g[V];
    gradient(c, u, v, g);
#pragma unroll
    for (int e = 0; e < V; ++e) along += g[e] * v[e];
  });
  along = group_sum<lanes>(along);
  if (!valid) return;
  const float back = n.norm_b > 0.0f ? along * n.of_b * n.of_b / n.norm_b : 0.0f;
  each_access<lanes, V>(x, y, C, [&](int c, const float(&u)[V], const float(&v)[V]) {
    float g[V];
    gradient(c, u, v, g);
#pragma unroll
    for (int e = 0; e < V; ++e) g[e] = n.norm_b > 0.0f ? g[e] * n.of_b - v[e] * back : 0.0f;
    store_vec<V>(db, p * C + c, pack<T, V>(g));
  });
}

// Calls f.operator()<lanes, V>() with the lanes that positions of C channels keep busy.
template <class F, class... Tensors>
void by_lanes(std::int64_t C, F&& f, const Tensors&... t) {
  by_width<8>(
      C,
      [&]<int V>() {
        if (C / V <= 8)
          f.template operator()<8, V>();
        else if (C / V <= 16)
          f.template operator()<16, V>();
        else
          f.template operator()<32, V>();
      },
      t...);
}

}  // namespace
}  // namespace weft::kernels

namespace weft::ops::cuda {

using namespace kernels;  // NOLINT: the operations are written in the kernels' words

void lpips_forward(const Tensor& a, const Tensor& b, const Tensor& w, float weight, Tensor& loss) {
  const std::int64_t C = a.dim(-1), frame = a.dim(2) * a.dim(3);
  by_type(a, [&]<class T>() {
    by_lanes(
        C,
        [&]<int lanes, int V>() {
          add_loss_sum<true>(
              Lpips<lanes, V, T>{data<T>(a), data<T>(b), data<float>(w), static_cast<int>(C / V)},
              a.numel() / C, 32, weight / static_cast<double>(frame), loss);
        },
        a, b, w);
  });
}

void lpips_backward(const Tensor& a, const Tensor& b, const Tensor& w, float weight, Tensor& db) {
  const std::int64_t C = a.dim(-1), positions = a.numel() / C;
  const float scale = -2.0f * weight / static_cast<float>(a.dim(2) * a.dim(3));
  by_type(a, [&]<class T>() {
    by_lanes(
        C,
        [&]<int lanes, int V>() {
          launch_threads(lpips_backward_kernel<lanes, V, T>, positions * lanes, data<T>(a),
                         data<T>(b), data<float>(w), scale, static_cast<int>(C / V), positions,
                         data<T>(db));
        },
        a, b, w, db);
  });
}

}  // namespace weft::ops::cuda
