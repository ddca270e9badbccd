// CUDA side of ops/pool.h. CPU twin: src/ops/cpu/pool.cpp; cases: src/bench/kernels/pool.cpp. Bound
// by memory, every operand read and every result written once.
//   2x2          16 bytes of the smaller side a thread
//   windows      16 bytes of the result a thread; the backward finds the greatest of each window
//   that
//                an element is in again: 36 reads from the caches for 3x3 of stride 2
//   adaptive     forward: a block has 32 accesses of one rectangle, its 8 warps take the pixels in
//                turn, and their sums are added in order; backward: 16 bytes of dx a thread
#include "ops/pool.h"

#include "divide.cuh"
#include "vector.cuh"

namespace weft::kernels {
namespace {

constexpr int threads = 256;

__device__ __forceinline__ std::int64_t index() {
  return static_cast<std::int64_t>(blockIdx.x) * threads + threadIdx.x;
}

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
  const std::int64_t i = index();
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
  const std::int64_t i = index();
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
  const std::int64_t i = index();
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
  const std::int64_t i = index();
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

// [frames,H,W,C] and, of the pooled side, [frames,h,w,C]; C in accesses.
struct WindowGrid {
  int H, W, h, w;
  std::int64_t C;
  ops::PoolWindow window;
};
// The pixels of window i of an axis.
struct Span {
  int begin, end;
  __device__ __forceinline__ Span(int i, ops::PoolWindow k, int length) {
    const int first = i * k.stride - k.padding;
    begin = max(first, 0);
    end = min(first + k.size, length);
  }
};

template <int V, class T>
__global__ void __launch_bounds__(threads)
    window_kernel(const T* x, WindowGrid g, T* y, std::int64_t count) {
  const std::int64_t i = index();
  if (i >= count) return;
  const std::int64_t c = i % g.C, frame = i / g.C / g.w / g.h;
  const Span rows(static_cast<int>(i / g.C / g.w % g.h), g.window, g.H),
      columns(static_cast<int>(i / g.C % g.w), g.window, g.W);
  float most[V];
#pragma unroll
  for (int e = 0; e < V; ++e) most[e] = -INFINITY;
  for (int r = rows.begin; r < rows.end; ++r)
    for (int q = columns.begin; q < columns.end; ++q) {
      float v[V];
      unpack(load_vec<V>(x, ((frame * g.H + r) * g.W + q) * g.C + c), v);
#pragma unroll
      for (int e = 0; e < V; ++e) most[e] = fmaxf(most[e], v[e]);
    }
  store_vec<V>(y, i, pack<T, V>(most));
}

template <int V, class T>
__global__ void __launch_bounds__(threads)
    window_backward_kernel(const T* x, WindowGrid g, const T* dy, T* dx, std::int64_t count) {
  const std::int64_t i = index();
  if (i >= count) return;
  const std::int64_t c = i % g.C, frame = i / g.C / g.W / g.H;
  const int row = static_cast<int>(i / g.C / g.W % g.H), column = static_cast<int>(i / g.C % g.W);
  const ops::PoolWindow k = g.window;
  // The windows that the pixel is in.
  const int r0 = max(0, (row + k.padding - k.size + k.stride) / k.stride),
            r1 = min(g.h - 1, (row + k.padding) / k.stride),
            q0 = max(0, (column + k.padding - k.size + k.stride) / k.stride),
            q1 = min(g.w - 1, (column + k.padding) / k.stride);
  float sum[V] = {};
  for (int r = r0; r <= r1; ++r)
    for (int q = q0; q <= q1; ++q) {
      const Span rows(r, k, g.H), columns(q, k, g.W);
      float most[V];
      bool mine[V];
#pragma unroll
      for (int e = 0; e < V; ++e)
        most[e] = -INFINITY, mine[e] = row == rows.begin && column == columns.begin;
      for (int a = rows.begin; a < rows.end; ++a)
        for (int b = columns.begin; b < columns.end; ++b) {
          float v[V];
          unpack(load_vec<V>(x, ((frame * g.H + a) * g.W + b) * g.C + c), v);
#pragma unroll
          for (int e = 0; e < V; ++e)
            if (v[e] > most[e]) most[e] = v[e], mine[e] = a == row && b == column;
        }
      float d[V];
      unpack(load_vec<V>(dy, ((frame * g.h + r) * g.w + q) * g.C + c), d);
#pragma unroll
      for (int e = 0; e < V; ++e) sum[e] += mine[e] ? d[e] : 0.0f;
    }
  store_vec<V>(dx, i, pack<T, V>(sum));
}

template <int V, class T>
__global__ void __launch_bounds__(threads)
    adaptive_kernel(const T* x, WindowGrid g, std::int64_t pieces, T* y) {
  constexpr int warps = threads / 32;
  float* shared = shared_memory<float>();  // [warps,V,32]
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const std::int64_t pixel = blockIdx.x / pieces, c = blockIdx.x % pieces * 32 + lane;
  const ops::PoolRange columns = ops::adaptive_range(pixel % g.w, g.w, g.W),
                       rows = ops::adaptive_range(pixel / g.w % g.h, g.h, g.H);
  const std::int64_t frame = pixel / g.w / g.h;
  const int width = static_cast<int>(columns.end - columns.begin),
            area = static_cast<int>(rows.end - rows.begin) * width;
  float sum[V] = {};
  if (c < g.C)
    for (int k = warp; k < area; k += warps) {
      float from[V];
      unpack(
          load_vec<V>(
              x,
              ((frame * g.H + rows.begin + k / width) * g.W + columns.begin + k % width) * g.C + c),
          from);
#pragma unroll
      for (int e = 0; e < V; ++e) sum[e] += from[e];
    }
#pragma unroll
  for (int e = 0; e < V; ++e) shared[(warp * V + e) * 32 + lane] = sum[e];
  __syncthreads();
  if (warp > 0 || c >= g.C) return;
#pragma unroll
  for (int e = 0; e < V; ++e) {
    sum[e] = 0.0f;
    for (int k = 0; k < warps; ++k) sum[e] += shared[(k * V + e) * 32 + lane];
    sum[e] *= 1.0f / static_cast<float>(area);
  }
  store_vec<V>(y, pixel * g.C + c, pack<T, V>(sum));
}

template <int V, class T>
__global__ void __launch_bounds__(threads)
    adaptive_backward_kernel(const T* dy, WindowGrid g, T* dx, bool accumulate,
                             std::int64_t count) {
  const std::int64_t i = index();
  if (i >= count) return;
  const std::int64_t c = i % g.C, frame = i / g.C / g.W / g.H;
  const ops::PoolRange rows = ops::adaptive_range(i / g.C / g.W % g.H, g.H, g.h),
                       columns = ops::adaptive_range(i / g.C % g.W, g.W, g.w);
  float sum[V] = {};
  if (accumulate) unpack(load_vec<V>(static_cast<const T*>(dx), i), sum);
  for (std::int64_t r = rows.begin; r < rows.end; ++r)
    for (std::int64_t q = columns.begin; q < columns.end; ++q) {
      const ops::PoolRange down = ops::adaptive_range(r, g.h, g.H),
                           across = ops::adaptive_range(q, g.w, g.W);
      const float share =
          1.0f / static_cast<float>((down.end - down.begin) * (across.end - across.begin));
      float d[V];
      unpack(load_vec<V>(dy, ((frame * g.h + r) * g.w + q) * g.C + c), d);
#pragma unroll
      for (int e = 0; e < V; ++e) sum[e] += share * d[e];
    }
  store_vec<V>(dx, i, pack<T, V>(sum));
}

// Calls f.operator()<T, V>() with the widest access that the channels and all tensors allow.
template <class F, class... Tensors>
void by_access(F&& f, const Tensor& x, const Tensors&... others) {
  by_type(x, [&]<class T>() {
    constexpr int V = 16 / sizeof(T);
    if (x.dim(4) % V == 0 && aligned<V>(x, others...))
      f.template operator()<T, V>();
    else
      f.template operator()<T, 1>();
  });
}

// `x` the side before the pooling, `y` behind it.
WindowGrid window_grid(const Tensor& x, const Tensor& y, int V, ops::PoolWindow window = {}) {
  return {static_cast<int>(x.dim(2)),
          static_cast<int>(x.dim(3)),
          static_cast<int>(y.dim(2)),
          static_cast<int>(y.dim(3)),
          x.dim(4) / V,
          window};
}

template <class... P, class... A>
void start(void (*kernel)(P...), std::int64_t count, A&&... args) {
  launch(kernel, dim3(blocks_for(count, threads)), dim3(threads), 0, std::forward<A>(args)...,
         count);
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
      [&]<class T, int V>() {
        start(max_pool_kernel<V, T>, y.numel() / V, data<T>(x), pool_grid(x, y, V), data<T>(y));
      },
      x, y);
}

void max_pool_backward(const Tensor& x, const Tensor& dy, Tensor& dx) {
  // An odd row or column belongs to no rectangle.
  if (x.dim(2) % 2 + x.dim(3) % 2 > 0 && dx.bytes() > 0)
    device_runtime().zero(dx.raw(), dx.bytes(), Stream::compute);
  if (dy.numel() == 0) return;
  by_access(
      [&]<class T, int V>() {
        start(max_pool_backward_kernel<V, T>, dy.numel() / V, data<T>(x), pool_grid(x, dy, V),
              data<T>(dy), data<T>(dx));
      },
      x, dy, dx);
}

void average_pool_2x2_forward(const Tensor& x, Tensor& y) {
  if (y.numel() == 0) return;
  by_access(
      [&]<class T, int V>() {
        start(average_kernel<V, T>, y.numel() / V, data<T>(x), square_grid(y, V), data<T>(y));
      },
      x, y);
}

void average_pool_2x2_backward(const Tensor& dy, Tensor& dx, bool accumulate) {
  if (dy.numel() == 0) return;
  by_access(
      [&]<class T, int V>() {
        start(average_backward_kernel<V, T>, dy.numel() / V, data<T>(dy), square_grid(dy, V),
              data<T>(dx), accumulate);
      },
      dy, dx);
}

void max_pool_window_forward(const Tensor& x, PoolWindow window, Tensor& y) {
  by_access(
      [&]<class T, int V>() {
        start(window_kernel<V, T>, y.numel() / V, data<T>(x), window_grid(x, y, V, window),
              data<T>(y));
      },
      x, y);
}

void max_pool_window_backward(const Tensor& x, PoolWindow window, const Tensor& dy, Tensor& dx) {
  by_access(
      [&]<class T, int V>() {
        start(window_backward_kernel<V, T>, dx.numel() / V, data<T>(x),
              window_grid(x, dy, V, window), data<T>(dy), data<T>(dx));
      },
      x, dy, dx);
}

void adaptive_pool_forward(const Tensor& x, Tensor& y) {
  by_access(
      [&]<class T, int V>() {
        const WindowGrid g = window_grid(x, y, V);
        const std::int64_t pieces = (g.C + 31) / 32, pixels = y.numel() / y.dim(4);
        launch(adaptive_kernel<V, T>, dim3(static_cast<unsigned>(pixels * pieces)), dim3(threads),
               sizeof(float) * threads * V, data<T>(x), g, pieces, data<T>(y));
      },
      x, y);
}

void adaptive_pool_backward(const Tensor& dy, Tensor& dx, bool accumulate) {
  by_access(
      [&]<class T, int V>() {
        start(adaptive_backward_kernel<V, T>, dx.numel() / V, data<T>(dy), window_grid(dx, dy, V),
              data<T>(dx), accumulate);
      },
      dy, dx);
}

}  // namespace weft::ops::cuda
