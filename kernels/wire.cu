// CUDA side of ops/wire.h. CPU twin: src/ops/cpu/wire.cpp; cases: src/bench/kernels/wire.cpp.
//
// Bound by memory, beside whatever the compute stream does. Least bytes an element: sum_parts 2 R + 4 for R ranks in bf16,
// convert_for_wire 6. A thread holds 16 bytes of each of four rows at a time; the order of the sum is that of the rows.
#include "ops/wire.h"

#include "vector.cuh"

namespace weft::kernels {
namespace {

constexpr int threads = 256;
constexpr int rows_at_once = 4;

template <int V, class T>
__global__ void __launch_bounds__(threads)
    sum_parts_kernel(const T* parts, float* sum, int ranks, std::int64_t count) {
  const std::int64_t at = static_cast<std::int64_t>(blockIdx.x) * threads + threadIdx.x;
  if (at * V >= count) return;
  float s[V] = {};
  for (int first = 0; first < ranks; first += rows_at_once) {
    Vec<T, V> x[rows_at_once];
#pragma unroll
    for (int k = 0; k < rows_at_once; ++k)
      if (first + k < ranks) x[k] = load_vec<V>(parts + (first + k) * count, at);
#pragma unroll
    for (int k = 0; k < rows_at_once; ++k) {
      if (first + k >= ranks) continue;
      float term[V];
      unpack(x[k], term);
      // Not 0 + x for the first: that would turn -0 into 0.
#pragma unroll
      for (int e = 0; e < V; ++e) s[e] = first + k == 0 ? term[e] : s[e] + term[e];
    }
  }
  store_vec<V>(sum, at, pack<float, V>(s));
}

template <int V, class From, class To>
__global__ void __launch_bounds__(threads)
    convert_kernel(const From* x, To* y, std::int64_t count) {
  const std::int64_t at = static_cast<std::int64_t>(blockIdx.x) * threads + threadIdx.x;
  if (at * V >= count) return;
  float f[V];
  unpack(load_vec<V>(x, at), f);
  store_vec<V>(y, at, pack<To, V>(f));
}

}  // namespace
}  // namespace weft::kernels

namespace weft::ops::cuda {

using namespace kernels;  // NOLINT: the operations are written in the kernels' words

void sum_parts(const Tensor& parts, Tensor& sum, Stream stream) {
  const int ranks = static_cast<int>(parts.dim(0));
  const std::int64_t count = sum.numel();
  WEFT_ASSERT(parts.numel() == ranks * count && sum.dtype() == DType::f32);
  by_type(parts, [&]<class T>() {
    const auto start = [&]<int V>() {
      launch_on(stream, sum_parts_kernel<V, T>, dim3(blocks_for(count, threads * V)), dim3(threads),
                0, data<T>(parts), data<float>(sum), ranks, count);
    };
    constexpr int V = Pack<T>::size;
    if (count % V == 0 && aligned<V>(parts, sum))
      start.template operator()<V>();
    else
      start.template operator()<1>();
  });
}

void convert_for_wire(const Tensor& x, Tensor& y, Stream stream) {
  const std::int64_t count = x.numel();
  WEFT_ASSERT(y.numel() == count);
  by_type(x, [&]<class From>() {
    by_type(y, [&]<class To>() {
      const auto start = [&]<int V>() {
        launch_on(stream, convert_kernel<V, From, To>, dim3(blocks_for(count, threads * V)),
                  dim3(threads), 0, data<From>(x), data<To>(y), count);
      };
      constexpr int V = 8;
      if (count % V == 0 && aligned<V>(x, y))
        start.template operator()<V>();
      else
        start.template operator()<1>();
    });
  });
}

}  // namespace weft::ops::cuda
