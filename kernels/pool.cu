// CUDA side of ops/resize.h for rectangles of 2x2; pool_windows.cu has the others. CPU twin:
// src/ops/cpu/pool.cpp; cases: tests/kernels/pool.cpp. Bound by memory, every operand read and
// every result written once: 16 bytes of the smaller side a thread.
#include "ops/resize.h"

#include "divide.cuh"
#include "vector.cuh"

namespace weft::kernels {
namespace {

// [frames,H,W,C], and of the pooled side [frames,h,w,C]; C in accesses.
struct PoolGrid {
  std::int64_t H, W, C;
  Divisor channels, w, h;

  // Access i of the pooled side: the first of its four.
  __device__ __forceinline__ std::int64_t corner(unsigned c) const {
    unsigned x = channels.split(c), y = w.split(x);
    const unsigned f = h.split(y);
    return ((f * H + 2 * y) * W + 2 * x) * C + c;
  }
};

template <int V, class T>
__global__ void __launch_bounds__(threads)
    max_pool_kernel(const T* x, PoolGrid g, T* y, std::int64_t count) {
  const std::int64_t i = thread_index();
  if (i >= count) return;
  const std::int64_t at = g.corner(static_cast<unsigned>(i)), below = at + g.W * g.C;
  float a[V], b[V], c[V], d[V];
  unpack(load_vec<V>(x, at), a);
  unpack(load_vec<V>(x, at + g.C), b);
  unpack(load_vec<V>(x, below), c);
  unpack(load_vec<V>(x, below + g.C), d);
#pragma unroll
  for (int e = 0; e < V; ++e) a[e] = fmaxf(fmaxf(a[e], b[e]), fmaxf(c[e], d[e]));
  store_vec<V>(y, i, pack<T, V>(a));
}

template <int V, class T>
__global__ void __launch_bounds__(threads)
    max_pool_backward_kernel(const T* x, PoolGrid g, const T* dy, T* dx, std::int64_t count) {
  const std::int64_t i = thread_index();
  if (i >= count) return;
  const std::int64_t corner = g.corner(static_cast<unsigned>(i));
  const std::int64_t at[4] = {corner, corner + g.C, corner + g.W * g.C, corner + (g.W + 1) * g.C};
  float d[V], v[4][V];
  unpack(load_vec<V>(dy, i), d);
#pragma unroll
  for (int k = 0; k < 4; ++k) unpack(load_vec<V>(x, at[k]), v[k]);
  int best[V];
#pragma unroll
  for (int e = 0; e < V; ++e) {
    best[e] = 0;
    float top = v[0][e];
#pragma unroll
    for (int k = 1; k < 4; ++k)
      if (v[k][e] > top) {
        top = v[k][e];
        best[e] = k;
      }
  }
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    float to[V];
#pragma unroll
    for (int e = 0; e < V; ++e) to[e] = k == best[e] ? d[e] : 0.0f;
    store_vec<V>(dx, at[k], pack<T, V>(to));
  }
}

// Access i of the smaller side, rows of w pixels of C accesses: the first of its four.
struct SquareGrid {
  std::int64_t w, C;
  Divisor columns, channels;
  __device__ __forceinline__ std::int64_t corner(unsigned c) const {
    unsigned x = channels.split(c);
    const std::int64_t y = columns.split(x);
    return (4 * y * w + 2 * x) * C + c;
  }
};

template <int V, class T>
__global__ void __launch_bounds__(threads)
    average_kernel(const T* x, SquareGrid g, T* y, std::int64_t count) {
  const std::int64_t i = thread_index();
  if (i >= count) return;
  const std::int64_t C = g.C, at = g.corner(static_cast<unsigned>(i)), below = at + 2 * g.w * C;
  float a[V], b[V], c[V], d[V];
  unpack(load_vec<V>(x, at), a);
  unpack(load_vec<V>(x, at + C), b);
  unpack(load_vec<V>(x, below), c);
  unpack(load_vec<V>(x, below + C), d);
#pragma unroll
  for (int e = 0; e < V; ++e) a[e] = 0.25f * ((a[e] + b[e]) + (c[e] + d[e]));
  store_vec<V>(y, i, pack<T, V>(a));
}

template <int V, class T>
__global__ void __launch_bounds__(threads)
    average_backward_kernel(const T* dy, SquareGrid g, T* dx, bool accumulate, std::int64_t count) {
  const std::int64_t i = thread_index();
  if (i >= count) return;
  float d[V];
  unpack(load_vec<V>(dy, i), d);
  const std::int64_t corner = g.corner(static_cast<unsigned>(i));
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    const std::int64_t at = corner + (k % 2 + k / 2 * 2 * g.w) * g.C;
    float to[V] = {};
    if (accumulate) unpack(load_vec<V>(static_cast<const T*>(dx), at), to);
#pragma unroll
    for (int e = 0; e < V; ++e) to[e] += 0.25f * d[e];
    store_vec<V>(dx, at, pack<T, V>(to));
  }
}

SquareGrid square_grid(const Tensor& y, int V) {
  const std::int64_t w = y.dim(3), C = y.dim(4) / V;
  WEFT_ASSERT(y.numel() / V < std::int64_t{1} << 31);
  return {w, C, Divisor(w), Divisor(C)};
}

PoolGrid pool_grid(const Tensor& x, const Tensor& y, int V) {
  const std::int64_t C = x.dim(4) / V;
  WEFT_ASSERT(y.numel() / V < std::int64_t{1} << 31);
  return {x.dim(2), x.dim(3), C, Divisor(C), Divisor(y.dim(3)), Divisor(y.dim(2))};
}

}  // namespace
}  // namespace weft::kernels

namespace weft::ops::cuda {

using namespace kernels;  // NOLINT: the operations are written in the kernels' words

void max_pool_forward(const Tensor& x, Tensor& y) {
  if (y.numel() == 0) return;
  by_access(
      x.dim(-1),
      [&]<class T, int V>() {
        launch_items(max_pool_kernel<V, T>, y.numel() / V, data<T>(x), pool_grid(x, y, V),
                     data<T>(y));
      },
      x, y);
}

void max_pool_backward(const Tensor& x, const Tensor& dy, Tensor& dx) {
  // An odd row or column belongs to no rectangle.
  if (x.dim(2) % 2 + x.dim(3) % 2 > 0 && dx.bytes() > 0)
    device_runtime().zero(dx.raw(), dx.bytes(), Stream::compute);
  if (dy.numel() == 0) return;
  by_access(
      x.dim(-1),
      [&]<class T, int V>() {
        launch_items(max_pool_backward_kernel<V, T>, dy.numel() / V, data<T>(x),
                     pool_grid(x, dy, V), data<T>(dy), data<T>(dx));
      },
      x, dy, dx);
}

void average_pool_2x2_forward(const Tensor& x, Tensor& y) {
  if (y.numel() == 0) return;
  by_access(
      x.dim(-1),
      [&]<class T, int V>() {
        launch_items(average_kernel<V, T>, y.numel() / V, data<T>(x), square_grid(y, V),
                     data<T>(y));
      },
      x, y);
}

void average_pool_2x2_backward(const Tensor& dy, Tensor& dx, bool accumulate) {
  if (dy.numel() == 0) return;
  by_access(
      dy.dim(-1),
      [&]<class T, int V>() {
        launch_items(average_backward_kernel<V, T>, dy.numel() / V, data<T>(dy), square_grid(dy, V),
                     data<T>(dx), accumulate);
      },
      dy, dx);
}

}  // namespace weft::ops::cuda
