// CUDA side of ops/random.h. CPU twin: src/ops/cpu/random.cpp; cases: tests/kernels/random.cpp.
//
// fill_normal writes 4 bytes an element and takes some 60 instructions for it (10 rounds of Philox
// and Box-Muller for 4), which is more than the writing. The rest is bound by memory and small:
// latents have 1/48 of their frames' values; an element of z a thread.
#include "ops/random.h"

#include "core/philox.h"
#include "launch.cuh"

namespace weft::kernels {
namespace {

// A thread makes one block of Philox, 4 values.
__global__ void normal_kernel(Philox random, std::int64_t count, bool packed, float* eps) {
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (4 * i >= count) return;
  const auto u = random.block(static_cast<std::uint32_t>(i));
  float z[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) z[j] = Philox::gauss(u[j / 2 * 2], u[j / 2 * 2 + 1], j % 2 != 0);
  if (packed && 4 * i + 4 <= count) {
    *reinterpret_cast<float4*>(eps + 4 * i) = make_float4(z[0], z[1], z[2], z[3]);
  } else {
#pragma unroll
    for (int j = 0; j < 4; ++j)
      if (4 * i + j < count) eps[4 * i + j] = z[j];
  }
}

// A tensor with C channels, seen as [outer,C,inner].
struct LatentGrid {
  std::int64_t C, inner, count;
};
LatentGrid latent_grid(const Tensor& z, ops::Channels channels) {
  if (channels == ops::Channels::last) return {z.dim(-1), 1, z.numel()};
  return {z.dim(1), z.numel() / (z.dim(0) * z.dim(1)), z.numel()};
}
// The same with half the channels.
LatentGrid half_of(const Tensor& moments, ops::Channels channels) {
  LatentGrid g = latent_grid(moments, channels);
  g.C /= 2;
  g.count /= 2;
  return g;
}

// The places of element i of z.
struct Element {
  std::int64_t mu, lv, channel;
  __device__ __forceinline__ Element(const LatentGrid& g, std::int64_t i) {
    channel = i / g.inner % g.C;
    mu = i + i / (g.C * g.inner) * g.C * g.inner;
    lv = mu + g.C * g.inner;
  }
};
__device__ __forceinline__ float clamped(float v) {
  return fminf(fmaxf(v, ops::lowest_log_variance), ops::highest_log_variance);
}
__device__ __forceinline__ float factor(const float* affine, std::int64_t c) {
  return affine == nullptr ? 1.0f : affine[c];
}
__device__ __forceinline__ float scaled(const float* affine, std::int64_t C, std::int64_t c,
                                        float x) {
  return affine == nullptr ? x : x * affine[c] + affine[C + c];
}
template <class T>
__device__ __forceinline__ void put(T* to, float v, bool accumulate) {
  *to = from_float<T>(accumulate ? to_float(*to) + v : v);
}

template <class M, class Z>
__global__ void draw_kernel(const M* moments, const float* eps, const float* affine, LatentGrid g,
                            Z* z) {
  const std::int64_t i = thread_index();
  if (i >= g.count) return;
  const Element e(g, i);
  float v = to_float(moments[e.mu]);
  if (eps != nullptr) v += expf(0.5f * clamped(to_float(moments[e.lv]))) * eps[i];
  z[i] = from_float<Z>(scaled(affine, g.C, e.channel, v));
}

template <class M, class Z>
__global__ void draw_backward_kernel(const M* moments, const float* eps, const float* affine,
                                     LatentGrid g, const Z* dz, M* dmoments, bool accumulate) {
  const std::int64_t i = thread_index();
  if (i >= g.count) return;
  const Element e(g, i);
  const float d = to_float(dz[i]) * factor(affine, e.channel), v = to_float(moments[e.lv]);
  const bool inside =
      eps != nullptr && v >= ops::lowest_log_variance && v <= ops::highest_log_variance;
  put(dmoments + e.mu, d, accumulate);
  put(dmoments + e.lv, inside ? 0.5f * d * eps[i] * expf(0.5f * v) : 0.0f, accumulate);
}

template <class T>
__global__ void clamp_kernel(const T* moments, LatentGrid g, T* y) {
  const std::int64_t i = thread_index();
  if (i >= g.count) return;
  const Element e(g, i);
  y[e.mu] = moments[e.mu];
  y[e.lv] = from_float<T>(clamped(to_float(moments[e.lv])));
}

template <class T>
__global__ void clamp_backward_kernel(const T* moments, LatentGrid g, const T* dy, T* dmoments,
                                      bool accumulate) {
  const std::int64_t i = thread_index();
  if (i >= g.count) return;
  const Element e(g, i);
  const float v = to_float(moments[e.lv]);
  put(dmoments + e.mu, to_float(dy[e.mu]), accumulate);
  put(dmoments + e.lv,
      v >= ops::lowest_log_variance && v <= ops::highest_log_variance ? to_float(dy[e.lv]) : 0.0f,
      accumulate);
}

}  // namespace
}  // namespace weft::kernels

namespace weft::ops::cuda {

using namespace kernels;  // NOLINT: the operations are written in the kernels' words

void fill_normal(std::uint64_t seed, int purpose, std::uint64_t step, std::uint64_t sample,
                 Tensor& eps) {
  launch(normal_kernel, dim3(blocks_for(eps.numel(), 4 * threads)), dim3(threads), 0,
         Philox(seed, static_cast<Purpose>(purpose), step, sample), eps.numel(),
         reinterpret_cast<std::uintptr_t>(data<float>(eps)) % 16 == 0, data<float>(eps));
}

void posterior_draw_forward(const Tensor& moments, const Tensor& eps, const Tensor& affine,
                            Channels channels, Tensor& z) {
  const LatentGrid g = latent_grid(z, channels);
  by_types(moments, z, [&]<class M, class Z>() {
    launch_threads(draw_kernel<M, Z>, g.count, data<M>(moments), data_or_null<float>(eps),
                   data_or_null<float>(affine), g, data<Z>(z));
  });
}

void posterior_draw_backward(const Tensor& moments, const Tensor& eps, const Tensor& affine,
                             Channels channels, const Tensor& dz, Tensor& dmoments,
                             bool accumulate) {
  const LatentGrid g = latent_grid(dz, channels);
  by_types(moments, dz, [&]<class M, class Z>() {
    launch_threads(draw_backward_kernel<M, Z>, g.count, data<M>(moments), data_or_null<float>(eps),
                   data_or_null<float>(affine), g, data<Z>(dz), data<M>(dmoments), accumulate);
  });
}

void clamp_log_variance_forward(const Tensor& moments, Channels channels, Tensor& y) {
  const LatentGrid g = half_of(moments, channels);
  by_type(moments, [&]<class T>() {
    launch_threads(clamp_kernel<T>, g.count, data<T>(moments), g, data<T>(y));
  });
}

void clamp_log_variance_backward(const Tensor& moments, Channels channels, const Tensor& dy,
                                 Tensor& dmoments, bool accumulate) {
  const LatentGrid g = half_of(moments, channels);
  by_type(moments, [&]<class T>() {
    launch_threads(clamp_backward_kernel<T>, g.count, data<T>(moments), g, data<T>(dy),
                   data<T>(dmoments), accumulate);
  });
}

}  // namespace weft::ops::cuda
