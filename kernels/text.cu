// CUDA side of ops/text.h but for attention (relative_attention.cu). CPU twin src/ops/cpu/text.cpp, cases
// src/bench/kernels/text.cpp.
//
// Bound by memory: rms_norm 2 elements read and written for each of M C, gated_gelu 3 of M F, embedding 2 of M C. 16 bytes
// an access. A row of the norm is a block's, read once from memory and once more from L1.
#include "ops/text.h"

#include "ptx.cuh"
#include "vector.cuh"

namespace weft::kernels {
namespace {

constexpr int threads = 256;

template <class T, int V>
__global__ void __launch_bounds__(threads)
    rms_norm_kernel(const T* x, const float* w, std::int64_t C, float eps, T* y) {
  const T* const from = x + blockIdx.x * C;
  float squares = 0.0f;
  for (std::int64_t i = threadIdx.x; i < C / V; i += threads) {
    float v[V];
    unpack(load_vec<V>(from, i), v);
#pragma unroll
    for (int k = 0; k < V; ++k) squares += v[k] * v[k];
  }
  const float sum = block_sum(squares, shared_memory<float>());
  const float scale = 1.0f / sqrtf(sum / static_cast<float>(C) + eps);
  for (std::int64_t i = threadIdx.x; i < C / V; i += threads) {
    float v[V];
    unpack(load_vec<V>(from, i), v);
#pragma unroll
    for (int k = 0; k < V; ++k) v[k] *= scale * w[i * V + k];
    store_vec<V>(y + blockIdx.x * C, i, pack<T, V>(v));
  }
}

// gelu(g) u, g sigmoid(2 k0 (g + k1 g^3)) u.
template <class T, int V>
__global__ void __launch_bounds__(threads)
    gated_gelu_kernel(const T* gate, const T* value, T* y, std::int64_t count) {
  constexpr float k0 = 0.79788456080286535588f, k1 = 0.044715f;  // sqrt(2/pi)
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * threads + threadIdx.x;
  if (i >= count) return;
  float g[V], u[V];
  unpack(load_vec<V>(gate, i), g);
  unpack(load_vec<V>(value, i), u);
#pragma unroll
  for (int k = 0; k < V; ++k) {
    const float z = 2.0f * k0 * (g[k] + k1 * g[k] * g[k] * g[k]);
    g[k] *= rcp_approx(1.0f + exp2_approx(-1.44269504088896341f * z)) * u[k];
  }
  store_vec<V>(y, i, pack<T, V>(g));
}

template <class T, int V>
__global__ void __launch_bounds__(threads)
    embedding_kernel(const std::int32_t* ids, const T* table, std::int64_t packs, T* y,
                     std::int64_t count) {
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * threads + threadIdx.x;
  if (i >= count) return;
  store_vec<V>(y, i, load_vec<V>(table, ids[i / packs] * packs + i % packs));
}

// Calls f.operator()<T, V>() with the widest access that rows of `length` allow.
template <class F, class... Tensors>
void by_access(std::int64_t length, F&& f, const Tensor& first, const Tensors&... rest) {
  by_type(first, [&]<class T>() {
    constexpr int V = Pack<T>::size;
    if (length % V == 0 && aligned<V>(first, rest...))
      f.template operator()<T, V>();
    else
      f.template operator()<T, 1>();
  });
}

}  // namespace
}  // namespace weft::kernels

namespace weft::ops::cuda {

using namespace kernels;  // NOLINT: the operations are written in the kernels' words

void rms_norm_forward(const Tensor& x, const Tensor& w, float eps, Tensor& y) {
  const std::int64_t C = w.numel();
  by_access(
      C,
      [&]<class T, int V>() {
        launch(rms_norm_kernel<T, V>, dim3(static_cast<unsigned>(x.numel() / C)), dim3(threads),
               32 * sizeof(float), data<T>(x), data<float>(w), C, eps, data<T>(y));
      },
      x, y);
}

void gated_gelu_forward(const Tensor& gu, Tensor& y) {
  const std::int64_t count = gu.numel() / 2;
  by_access(
      count,
      [&]<class T, int V>() {
        launch(gated_gelu_kernel<T, V>, dim3(blocks_for(count / V, threads)), dim3(threads), 0,
               data<T>(gu), data<T>(gu) + count, data<T>(y), count / V);
      },
      gu, y);
}

void embedding_forward(const Tensor& ids, const Tensor& table, Tensor& y) {
  const std::int64_t C = table.dim(1), count = ids.numel() * C;
  by_access(
      C,
      [&]<class T, int V>() {
        launch(embedding_kernel<T, V>, dim3(blocks_for(count / V, threads)), dim3(threads), 0,
               data<std::int32_t>(ids), data<T>(table), C / V, data<T>(y), count / V);
      },
      table, y);
}

}  // namespace weft::ops::cuda
