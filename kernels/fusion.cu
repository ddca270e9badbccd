// CUDA side of ops/pointwise.h. CPU twin: src/ops/cpu/fusion.cpp; cases: tests/kernels/fusion.cpp.
//
// Bound by memory: every activation is read and written once. Elementwise operations: 16 bytes a
// thread. Sums over the channels of a pixel, or of a group of them: by as many neighbouring lanes
// of a warp as there are accesses to add (a power of two, at most 32), in an order that depends on
// their number alone.
#include "ops/pointwise.h"

#include "core/error.h"
#include "divide.cuh"
#include "vector.cuh"

namespace weft::kernels {
namespace {

// Rows of C accesses, `pixels` of them a sample; fewer than 2^31 accesses.
template <int V, class T>
__global__ void __launch_bounds__(threads)
    add_outer_kernel(const T* x, const T* by_channel, const T* by_pixel, Divisor C, Divisor pixels,
                     int width, T* y, std::int64_t count) {
  const std::int64_t i = thread_index();
  if (i >= count) return;
  unsigned c = static_cast<unsigned>(i);
  const unsigned pixel = C.split(c);
  float v[V], terms[V] = {};
  unpack(load_vec<V>(x, i), v);
  if (by_channel != nullptr)
    unpack(load_vec<V>(by_channel, static_cast<std::int64_t>(pixels.divide(pixel)) * width + c),
           terms);
  const float term = by_pixel == nullptr ? 0.0f : to_float(by_pixel[pixel]);
#pragma unroll
  for (int e = 0; e < V; ++e) v[e] = v[e] + terms[e] + term;
  store_vec<V>(y, i, pack<T, V>(v));
}

template <int V, class T>
__global__ void __launch_bounds__(threads)
    repeat_kernel(const T* dy, float factor, Divisor C, T* dx, bool accumulate,
                  std::int64_t count) {
  const std::int64_t i = thread_index();
  if (i >= count) return;
  const float d = factor * to_float(dy[C.divide(static_cast<unsigned>(i))]);
  float v[V] = {};
  if (accumulate) unpack(load_vec<V>(static_cast<const T*>(dx), i), v);
#pragma unroll
  for (int e = 0; e < V; ++e) v[e] += d;
  store_vec<V>(dx, i, pack<T, V>(v));
}

// Groups of `size` accesses.
template <int V, class T>
__global__ void __launch_bounds__(threads)
    scale_kernel(const T* x, const T* a, Divisor size, T* y, std::int64_t count) {
  const std::int64_t i = thread_index();
  if (i >= count) return;
  const float factor = to_float(a[size.divide(static_cast<unsigned>(i))]);
  float v[V];
  unpack(load_vec<V>(x, i), v);
#pragma unroll
  for (int e = 0; e < V; ++e) v[e] *= factor;
  store_vec<V>(y, i, pack<T, V>(v));
}

// The sum over `lanes` neighbouring lanes, to each of them; every lane of the warp is here.
template <int lanes>
__device__ __forceinline__ float lanes_sum(float x) {
#pragma unroll
  for (int offset = lanes / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(full_mask, x, offset);
  return x;
}

// The sums of rows of `size` accesses.
template <int lanes, int V, class T>
__global__ void __launch_bounds__(threads)
    sum_channels_kernel(const T* x, int size, float factor, T* y, bool accumulate,
                        std::int64_t rows) {
  const std::int64_t row = thread_index() / lanes;
  const int lane = static_cast<int>(threadIdx.x) % lanes;
  float sum = 0.0f;
  if (row < rows) {
    const T* const own = x + row * size * V;
#pragma unroll 4
    for (int i = lane; i < size; i += lanes) {
      float v[V];
      unpack(load_vec<V>(own, i), v);
#pragma unroll
      for (int e = 0; e < V; ++e) sum += v[e];
    }
  }
  sum = factor * lanes_sum<lanes>(sum);
  if (row < rows && lane == 0) y[row] = from_float<T>(accumulate ? to_float(y[row]) + sum : sum);
}

// Both results in one reading of dy; dx may be dy. with_dx, with_da: what is wanted.
template <int lanes, int V, bool with_dx, bool with_da, class T>
__global__ void __launch_bounds__(threads)
    scale_backward_kernel(const T* x, const T* a, const T* dy, int size, T* dx, T* da,
                          std::int64_t groups) {
  const std::int64_t group = thread_index() / lanes;
  const int lane = static_cast<int>(threadIdx.x) % lanes;
  float sum = 0.0f;
  if (group < groups) {
    const float factor = to_float(a[group]);
    const std::int64_t first = group * size;
#pragma unroll 2
    for (int i = lane; i < size; i += lanes) {
      float d[V];
      unpack(load_vec<V>(dy, first + i), d);
      if constexpr (with_da) {
        float v[V];
        unpack(load_vec<V>(x, first + i), v);
#pragma unroll
        for (int e = 0; e < V; ++e) sum += v[e] * d[e];
      }
      if constexpr (with_dx) {
#pragma unroll
        for (int e = 0; e < V; ++e) d[e] *= factor;
        store_vec<V>(dx, first + i, pack<T, V>(d));
      }
    }
  }
  if constexpr (with_da) {
    sum = lanes_sum<lanes>(sum);
    if (group < groups && lane == 0) da[group] = from_float<T>(sum);
  }
}

// Calls f.operator()<lanes>() with as many lanes as add `accesses`.
template <class F>
void by_lanes(std::int64_t accesses, F&& f) {
  accesses <= 1    ? f.template operator()<1>()
  : accesses <= 2  ? f.template operator()<2>()
  : accesses <= 4  ? f.template operator()<4>()
  : accesses <= 8  ? f.template operator()<8>()
  : accesses <= 16 ? f.template operator()<16>()
                   : f.template operator()<32>();
}

}  // namespace
}  // namespace weft::kernels

namespace weft::ops::cuda {

using namespace kernels;  // NOLINT: the operations are written in the kernels' words

void add_outer(const Tensor& x, const Tensor& by_channel, const Tensor& by_pixel, Tensor& y) {
  const std::int64_t C = x.dim(-1), pixels = x.numel() / C / x.dim(0);
  WEFT_ASSERT(!by_channel.defined() || by_channel.numel() == x.dim(0) * C);
  WEFT_ASSERT(!by_pixel.defined() || by_pixel.numel() == x.numel() / C);
  by_access(
      C,
      [&]<class T, int V>() {
        const std::int64_t count = x.numel() / V;
        launch_items(add_outer_kernel<V, T>, dividend(count), data<T>(x),
                     data_or_null<T>(by_channel), data_or_null<T>(by_pixel), Divisor(C / V),
                     Divisor(pixels), static_cast<int>(C / V), data<T>(y));
      },
      x, by_channel, y);
}

void sum_channels(const Tensor& x, float factor, Tensor& y, bool accumulate) {
  const std::int64_t C = x.dim(-1), rows = y.numel();
  WEFT_ASSERT(rows == x.numel() / C && x.dtype() == y.dtype());
  by_access(
      C,
      [&]<class T, int V>() {
        by_lanes(C / V, [&]<int lanes>() {
          launch_threads(sum_channels_kernel<lanes, V, T>, dividend(rows * lanes), data<T>(x),
                         static_cast<int>(C / V), factor, data<T>(y), accumulate, rows);
        });
      },
      x);
}

void repeat_channels(const Tensor& dy, float factor, Tensor& dx, bool accumulate) {
  const std::int64_t C = dx.dim(-1);
  WEFT_ASSERT(dy.numel() == dx.numel() / C && dx.dtype() == dy.dtype());
  by_access(
      C,
      [&]<class T, int V>() {
        const std::int64_t count = dx.numel() / V;
        launch_items(repeat_kernel<V, T>, dividend(count), data<T>(dy), factor, Divisor(C / V),
                     data<T>(dx), accumulate);
      },
      dx);
}

void scale_groups_forward(const Tensor& x, const Tensor& a, Tensor& y) {
  const std::int64_t size = x.dim(-1) / a.dim(-1);
  WEFT_ASSERT(size * a.numel() == x.numel() && x.dtype() == a.dtype());
  by_access(
      size,
      [&]<class T, int V>() {
        const std::int64_t count = x.numel() / V;
        launch_items(scale_kernel<V, T>, dividend(count), data<T>(x), data<T>(a), Divisor(size / V),
                     data<T>(y));
      },
      x, y);
}

void scale_groups_backward(const Tensor& x, const Tensor& a, const Tensor& dy, Tensor& dx,
                           Tensor& da) {
  const std::int64_t size = x.dim(-1) / a.dim(-1), groups = a.numel();
  WEFT_ASSERT(size * groups == x.numel() && x.dtype() == a.dtype());
  if (!dx.defined() && !da.defined()) return;
  by_access(
      size,
      [&]<class T, int V>() {
        by_lanes(size / V, [&]<int lanes>() {
          const auto kernel = dx.defined() && da.defined()
                                  ? scale_backward_kernel<lanes, V, true, true, T>
                              : dx.defined() ? scale_backward_kernel<lanes, V, true, false, T>
                                             : scale_backward_kernel<lanes, V, false, true, T>;
          launch_threads(kernel, dividend(groups * lanes), data<T>(x), data<T>(a), data<T>(dy),
                         static_cast<int>(size / V), data_or_null<T>(dx), data_or_null<T>(da),
                         groups);
        });
      },
      x, dy, dx);
}

}  // namespace weft::ops::cuda
