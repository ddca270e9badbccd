// How a kernel is started, and what every kernel file needs. Kernels are started by launch(), never
// by <<<>>>, so that tests/cuda_on_cpu can compile the same sources with a host compiler. Rules
// that follow from that:
//   - shared memory is dynamic and comes from shared_memory<T>(); no __shared__ variables;
//   - PTX stands in ptx.cuh alone, as functions;
//   - every thread of a block reaches every __syncthreads(), every lane named in a mask its warp
//     function.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>
#include <utility>

#include "tensor/device_cuda.h"
#include "tensor/tensor.h"

namespace weft::kernels {

// Starts `kernel` on `stream`. `shared` bytes of dynamic shared memory; above 48 KiB the kernel's
// limit is raised.
template <class... P, class... A>
void launch_on(Stream stream, void (*kernel)(P...), dim3 grid, dim3 block, std::size_t shared,
               A&&... args) {
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) return;
  if (shared > 48 * 1024)
    CUDA_CHECK(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                    cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    static_cast<int>(shared)));
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared;
  config.stream = cuda_stream(stream);
  CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, static_cast<P>(args)...));
}

// The same on the compute stream.
template <class... P, class... A>
void launch(void (*kernel)(P...), dim3 grid, dim3 block, std::size_t shared, A&&... args) {
  launch_on(Stream::compute, kernel, grid, block, shared, std::forward<A>(args)...);
}

inline unsigned blocks_for(std::int64_t items, int per_block) {
  return static_cast<unsigned>((items + per_block - 1) / per_block);
}

// Threads of a block, of every kernel that does not ask for another number.
constexpr int threads = 256, warps = threads / 32;

// Which thread of the grid this is, in blocks of `threads`.
__device__ __forceinline__ std::int64_t thread_index() {
  return static_cast<std::int64_t>(blockIdx.x) * threads + threadIdx.x;
}

// Starts `count` threads, rounded up to whole blocks.
template <class... P, class... A>
void launch_threads(void (*kernel)(P...), std::int64_t count, A&&... args) {
  launch(kernel, dim3(blocks_for(count, threads)), dim3(threads), 0, std::forward<A>(args)...);
}
// The same, and `count` is the kernel's last argument.
template <class... P, class... A>
void launch_items(void (*kernel)(P...), std::int64_t count, A&&... args) {
  launch_threads(kernel, count, std::forward<A>(args)..., count);
}

#ifndef WEFT_CUDA_ON_CPU
// The block's dynamic shared memory, aligned to 1024 bytes (what bulk copies with swizzles want).
template <class T>
__device__ __forceinline__ T* shared_memory() {
  extern __shared__ __align__(1024) unsigned char weft_shared[];
  return reinterpret_cast<T*>(weft_shared);
}
#endif

// Device addresses of a tensor's elements; a wrong T is a bug and throws. weft::bf16 on the host is
// __nv_bfloat16 here.
template <class T>
inline T* data(const Tensor& t) {
  return t.device_data<T>();
}
template <>
inline __nv_bfloat16* data<__nv_bfloat16>(const Tensor& t) {
  return reinterpret_cast<__nv_bfloat16*>(t.device_data<bf16>());
}
// The same, or null for a tensor that is not given.
template <class T>
inline T* data_or_null(const Tensor& t) {
  return t.defined() ? data<T>(t) : nullptr;
}

// Calls f.operator()<float>() or f.operator()<__nv_bfloat16>() by the tensor's type:
//   by_type(x, [&]<class T>() { launch(silu_kernel<T>, ...); });
template <class F>
void by_type(const Tensor& t, F&& f) {
  if (t.dtype() == DType::f32)
    f.template operator()<float>();
  else {
    WEFT_ASSERT(t.dtype() == DType::bf16);
    f.template operator()<__nv_bfloat16>();
  }
}
// Calls f.operator()<A, B>() with the types of both tensors.
template <class F>
void by_types(const Tensor& a, const Tensor& b, F&& f) {
  by_type(a, [&]<class A>() { by_type(b, [&]<class B>() { f.template operator()<A, B>(); }); });
}

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
template <class T>
__device__ __forceinline__ T from_float(float x) {
  if constexpr (sizeof(T) == 2)
    return __float2bfloat16_rn(x);
  else
    return x;
}

// 16 bytes of T in registers: one coalesced access a thread.
template <class T>
struct alignas(16) Pack {
  static constexpr int size = 16 / sizeof(T);
  T v[size];
};
template <class T>
__device__ __forceinline__ Pack<T> load_pack(const T* p) {
#ifdef __CUDA_ARCH__
  const uint4 bits = *reinterpret_cast<const uint4*>(p);
  Pack<T> x;
  memcpy(&x, &bits, sizeof bits);
  return x;
#else
  return *reinterpret_cast<const Pack<T>*>(p);
#endif
}
template <class T>
__device__ __forceinline__ void store_pack(T* p, const Pack<T>& x) {
#ifdef __CUDA_ARCH__
  // nvcc turns element-wise copies of the struct into two-byte stores.
  uint4 bits;
  memcpy(&bits, &x, sizeof bits);
  *reinterpret_cast<uint4*>(p) = bits;
#else
  *reinterpret_cast<Pack<T>*>(p) = x;
#endif
}

constexpr unsigned full_mask = 0xffffffffu;
// x, of which the compiler knows nothing: what is made of it is made where the call stands, rather
// than before a loop that needs all registers.
__device__ __forceinline__ int opaque(int x) {
  asm volatile("" : "+r"(x));
  return x;
}
__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(full_mask, x, offset);
  return x;
}
__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2)
    x = fmaxf(x, __shfl_xor_sync(full_mask, x, offset));
  return x;
}
// Sum over the block, to every thread; `scratch` holds 32 floats of shared memory that nothing else
// uses meanwhile.
__device__ __forceinline__ float block_sum(float x, float* scratch) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, block_warps = (blockDim.x + 31) / 32;
  x = warp_sum(x);
  __syncthreads();
  if (lane == 0) scratch[warp] = x;
  __syncthreads();
  x = lane < block_warps ? scratch[lane] : 0.0f;
  return warp_sum(x);
}

}  // namespace weft::kernels
