// What pool.cu and pool_windows.cu share: how accesses are numbered and kernels started.
#pragma once

#include "divide.cuh"
#include "vector.cuh"

namespace weft::kernels::pool {

constexpr int threads = 256;

__device__ __forceinline__ std::int64_t index() {
  return static_cast<std::int64_t>(blockIdx.x) * threads + threadIdx.x;
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

// Starts `count` threads, which are told so last.
template <class... P, class... A>
void start(void (*kernel)(P...), std::int64_t count, A&&... args) {
  launch(kernel, dim3(blocks_for(count, threads)), dim3(threads), 0, std::forward<A>(args)...,
         count);
}

}  // namespace weft::kernels::pool
