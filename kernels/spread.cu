// CUDA side of ops/layout.h's spread_2x2. CPU twin: src/ops/cpu/layout.cpp; cases:
// src/bench/kernels/layout.cpp.
//
// Bound by memory: each element is read and written once. A thread takes 16 bytes of each of the
// four pixels, that is 64 neighbouring bytes of a row, so that every access is whole and only the
// order of the values changes, in registers.
#include "core/error.h"
#include "ops/layout.h"
#include "vector.cuh"

namespace weft::kernels {
namespace {

constexpr int threads = 256;

// Access i of the small side, rows of w pixels of C accesses; corner(k): access in pixel k of the
// square that it makes.
struct Square {
  std::int64_t first, w, C;
  __device__ __forceinline__ Square(std::int64_t i, std::int64_t width, std::int64_t channels)
      : first((4 * (i / channels / width) * width + 2 * (i / channels % width)) * channels +
              i % channels),
        w(width),
        C(channels) {}
  __device__ __forceinline__ std::int64_t corner(int k) const {
    return first + (k % 2 + k / 2 * 2 * w) * C;
  }
};

template <int V, class T>
__global__ void __launch_bounds__(threads)
    spread_kernel(const T* rows, const float* bias, std::int64_t w, std::int64_t C, T* y,
                  std::int64_t count) {
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * threads + threadIdx.x;
  if (i >= count) return;
  float from[4][V], to[4][V];
#pragma unroll
  for (int k = 0; k < 4; ++k) unpack(load_vec<V>(rows, 4 * i + k), from[k]);
#pragma unroll
  for (int e = 0; e < V; ++e) {
    const float add = bias == nullptr ? 0.0f : bias[i % C * V + e];
#pragma unroll
    for (int k = 0; k < 4; ++k) to[k][e] = from[(4 * e + k) / V][(4 * e + k) % V] + add;
  }
  const Square square(i, w, C);
#pragma unroll
  for (int k = 0; k < 4; ++k) store_vec<V>(y, square.corner(k), pack<T, V>(to[k]));
}

template <int V, class T>
__global__ void __launch_bounds__(threads)
    spread_backward_kernel(const T* dy, std::int64_t w, std::int64_t C, T* drows,
                           std::int64_t count) {
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * threads + threadIdx.x;
  if (i >= count) return;
  const Square square(i, w, C);
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

// Calls f.operator()<T, V>() for `large` [N,T,2H,2W,C].
template <class F>
void by_access(const Tensor& large, const Tensor& rows, F&& f) {
  WEFT_ASSERT(rows.dim(4) == 4 * large.dim(4) && rows.numel() == large.numel() &&
              large.dim(2) == 2 * rows.dim(2));
  by_type(large, [&]<class T>() {
    constexpr int V = 16 / sizeof(T);
    if (large.dim(4) % V == 0 && aligned<V>(large, rows))
      f.template operator()<T, V>();
    else
      f.template operator()<T, 1>();
  });
}

}  // namespace
}  // namespace weft::kernels

namespace weft::ops::cuda {

using namespace kernels;  // NOLINT: the operations are written in the kernels' words

void spread_2x2_forward(const Tensor& rows, const Tensor& bias, Tensor& y) {
  by_access(y, rows, [&]<class T, int V>() {
    const std::int64_t count = y.numel() / 4 / V;
    launch(spread_kernel<V, T>, dim3(blocks_for(count, threads)), dim3(threads), 0, data<T>(rows),
           data_or_null<float>(bias), rows.dim(3), y.dim(4) / V, data<T>(y), count);
  });
}

void spread_2x2_backward(const Tensor& dy, Tensor& drows) {
  by_access(dy, drows, [&]<class T, int V>() {
    const std::int64_t count = dy.numel() / 4 / V;
    launch(spread_backward_kernel<V, T>, dim3(blocks_for(count, threads)), dim3(threads), 0,
           data<T>(dy), drows.dim(3), dy.dim(4) / V, data<T>(drows), count);
  });
}

}  // namespace weft::ops::cuda
