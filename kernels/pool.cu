// CUDA side of ops/pool.h. CPU twin: src/ops/cpu/pool.cpp; cases: src/bench/kernels/pool.cpp. Bound
// by memory, every operand read and every result written once; an element of the smaller side a
// thread.
#include "ops/pool.h"

#include "launch.cuh"

namespace weft::kernels {
namespace {

constexpr int threads = 256;

__device__ __forceinline__ std::int64_t index() {
  return static_cast<std::int64_t>(blockIdx.x) * threads + threadIdx.x;
}

// [frames,H,W,C], and of the pooled side [frames,h,w,C].
struct PoolGrid {
  std::int64_t H, W, h, w, C;

  // Element i of the pooled side: the first of its four.
  __device__ __forceinline__ std::int64_t corner(std::int64_t i) const {
    const std::int64_t c = i % C, x = i / C % w, y = i / C / w % h, f = i / C / w / h;
    return ((f * H + 2 * y) * W + 2 * x) * C + c;
  }
};

template <class T>
__global__ void max_pool_kernel(const T* x, PoolGrid g, T* y, std::int64_t count) {
  const std::int64_t i = index();
  if (i >= count) return;
  const T* const from = x + g.corner(i);
  const float a = to_float(from[0]), b = to_float(from[g.C]), c = to_float(from[g.W * g.C]),
              d = to_float(from[(g.W + 1) * g.C]);
  y[i] = from_float<T>(fmaxf(fmaxf(a, b), fmaxf(c, d)));
}

template <class T>
__global__ void max_pool_backward_kernel(const T* x, PoolGrid g, const T* dy, T* dx,
                                         std::int64_t count) {
  const std::int64_t i = index();
  if (i >= count) return;
  const std::int64_t corner = g.corner(i);
  const std::int64_t at[4] = {corner, corner + g.C, corner + g.W * g.C, corner + (g.W + 1) * g.C};
  int best = 0;
  float top = to_float(x[at[0]]);
#pragma unroll
  for (int k = 1; k < 4; ++k)
    if (const float v = to_float(x[at[k]]); v > top) {
      top = v;
      best = k;
    }
#pragma unroll
  for (int k = 0; k < 4; ++k) dx[at[k]] = k == best ? dy[i] : from_float<T>(0.0f);
}

template <class... P, class... A>
void start(void (*kernel)(P...), std::int64_t count, A&&... args) {
  launch(kernel, dim3(blocks_for(count, threads)), dim3(threads), 0, std::forward<A>(args)...,
         count);
}

PoolGrid pool_grid(const Tensor& x, const Tensor& y) {
  return {x.dim(2), x.dim(3), y.dim(2), y.dim(3), x.dim(4)};
}

}  // namespace
}  // namespace weft::kernels

namespace weft::ops::cuda {

using namespace kernels;  // NOLINT: the operations are written in the kernels' words

void max_pool_forward(const Tensor& x, Tensor& y) {
  by_type(x, [&]<class T>() {
    start(max_pool_kernel<T>, y.numel(), data<T>(x), pool_grid(x, y), data<T>(y));
  });
}

void max_pool_backward(const Tensor& x, const Tensor& dy, Tensor& dx) {
  const PoolGrid g = pool_grid(x, dy);
  // An odd row or column belongs to no rectangle.
  if (g.H % 2 + g.W % 2 > 0 && dx.bytes() > 0)
    device_runtime().zero(dx.raw(), dx.bytes(), Stream::compute);
  by_type(x, [&]<class T>() {
    start(max_pool_backward_kernel<T>, dy.numel(), data<T>(x), g, data<T>(dy), data<T>(dx));
  });
}

}  // namespace weft::ops::cuda
