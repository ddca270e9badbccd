// CUDA side of ops/layout.h's spread_2x2 and spread_4x4. CPU twin: src/ops/cpu/layout.cpp; cases:
// tests/kernels/layout.cpp.
//
// Bound by memory: each element is read and written once. A thread takes 16 bytes of each of the
// four pixels, that is 64 neighbouring bytes of a row, so that every access is whole and only the
// order of the values changes, in registers.
#include "core/error.h"
#include "divide.cuh"
#include "ops/layout.h"
#include "vector.cuh"

namespace weft::kernels {
namespace {

constexpr std::int64_t most_accesses = std::int64_t{1} << 31;  // what Divisor divides

// Access i of the small side, rows of w pixels of C accesses; corner(k): access in pixel k of the
// square that it makes.
struct Block2x2 {
  std::int64_t first, w, C;
  unsigned c;  // the access within its pixel
  __device__ __forceinline__ Block2x2(std::int64_t i, std::int64_t width, std::int64_t channels,
                                      const Divisor& by_width, const Divisor& by_channels)
      : w(width), C(channels), c(static_cast<unsigned>(i)) {
    unsigned column = by_channels.split(c);
    const std::int64_t row = by_width.split(column);
    first = (4 * row * w + 2 * column) * C + c;
  }
  __device__ __forceinline__ std::int64_t corner(int k) const {
    return first + (k % 2 + k / 2 * 2 * w) * C;
  }
};

template <int V, class T>
__global__ void __launch_bounds__(threads)
    spread_kernel(const T* rows, const float* bias, std::int64_t w, std::int64_t C,
                  Divisor by_width, Divisor by_channels, T* y, std::int64_t count) {
  const std::int64_t i = thread_index();
  if (i >= count) return;
  const Block2x2 square(i, w, C, by_width, by_channels);
  float from[4][V], to[4][V];
#pragma unroll
  for (int k = 0; k < 4; ++k) unpack(load_vec<V>(rows, 4 * i + k), from[k]);
#pragma unroll
  for (int e = 0; e < V; ++e) {
    const float add = bias == nullptr ? 0.0f : bias[square.c * V + e];
#pragma unroll
    for (int k = 0; k < 4; ++k) to[k][e] = from[(4 * e + k) / V][(4 * e + k) % V] + add;
  }
#pragma unroll
  for (int k = 0; k < 4; ++k) store_vec<V>(y, square.corner(k), pack<T, V>(to[k]));
}

template <int V, class T>
__global__ void __launch_bounds__(threads)
    spread_backward_kernel(const T* dy, std::int64_t w, std::int64_t C, Divisor by_width,
                           Divisor by_channels, T* drows, std::int64_t count) {
  const std::int64_t i = thread_index();
  if (i >= count) return;
  const Block2x2 square(i, w, C, by_width, by_channels);
  float from[4][V], to[4][V];
#pragma unroll
  for (int k = 0; k < 4; ++k) unpack(load_vec<V>(dy, square.corner(k)), from[k]);
#pragma unroll
  for (int e = 0; e < V; ++e)
#pragma unroll
    for (int k = 0; k < 4; ++k) to[(4 * e + k) / V][(4 * e + k) % V] = from[k][e];
#pragma unroll
  for (int k = 0; k < 4; ++k) store_vec<V>(drows, 4 * i + k, pack<T, V>(to[k]));
}

// A thread writes one access of y; what it reads of the rows is read again by up to three others
// nearby, from the cache.
template <int V, class T>
__global__ void __launch_bounds__(threads)
    spread_4x4_kernel(const T* rows, std::int64_t w, std::int64_t C, Divisor by_columns,
                      Divisor by_channels, T* y, std::int64_t count) {
  const std::int64_t i = thread_index();
  if (i >= count) return;
  unsigned c = static_cast<unsigned>(i), column = by_channels.split(c);
  const unsigned line = by_columns.split(column);
  const unsigned k = (line % 4 + 1) / 2 * 3 + (column % 4 + 1) / 2;
  const std::int64_t from = ((line / 4 * w + column / 4) * 9 + k) * C + c;
  float values[V];
  unpack(load_vec<V>(rows, from), values);
  store_vec<V>(y, i, pack<T, V>(values));
}

// `large` [N,T,2H,2W,C] of rows [N,T,H,W,4C].
void check_2x2(const Tensor& large, const Tensor& rows) {
  WEFT_ASSERT(rows.dim(4) == 4 * large.dim(4) && rows.numel() == large.numel() &&
              large.dim(2) == 2 * rows.dim(2));
}

}  // namespace
}  // namespace weft::kernels

namespace weft::ops::cuda {

using namespace kernels;  // NOLINT: the operations are written in the kernels' words

void spread_2x2_forward(const Tensor& rows, const Tensor& bias, Tensor& y) {
  check_2x2(y, rows);
  by_access(
      y.dim(4),
      [&]<class T, int V>() {
        const std::int64_t count = y.numel() / 4 / V;
        WEFT_ASSERT(count < most_accesses);
        launch_items(spread_kernel<V, T>, count, data<T>(rows), data_or_null<float>(bias),
                     rows.dim(3), y.dim(4) / V, Divisor(rows.dim(3)), Divisor(y.dim(4) / V),
                     data<T>(y));
      },
      y, rows);
}

void spread_2x2_backward(const Tensor& dy, Tensor& drows) {
  check_2x2(dy, drows);
  by_access(
      dy.dim(4),
      [&]<class T, int V>() {
        const std::int64_t count = dy.numel() / 4 / V;
        WEFT_ASSERT(count < most_accesses);
        launch_items(spread_backward_kernel<V, T>, count, data<T>(dy), drows.dim(3), dy.dim(4) / V,
                     Divisor(drows.dim(3)), Divisor(dy.dim(4) / V), data<T>(drows));
      },
      dy, drows);
}

void spread_4x4(const Tensor& rows, Tensor& y) {
  WEFT_ASSERT(rows.dim(4) == 9 * y.dim(4) && y.dim(2) == 4 * rows.dim(2) &&
              y.dim(3) == 4 * rows.dim(3) && y.numel() * 9 == rows.numel() * 16);
  by_access(
      y.dim(4),
      [&]<class T, int V>() {
        const std::int64_t count = y.numel() / V;
        WEFT_ASSERT(count < most_accesses);
        launch_items(spread_4x4_kernel<V, T>, count, data<T>(rows), rows.dim(3), y.dim(4) / V,
                     Divisor(y.dim(3)), Divisor(y.dim(4) / V), data<T>(y));
      },
      y, rows);
}

}  // namespace weft::ops::cuda
