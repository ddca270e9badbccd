// The PTX instructions that kernels use, as functions (PTX ISA 8.x, sections named at each).
// tests/cuda_on_cpu/include/emulated_ptx.h gives the same functions by their documented meaning
// where the kernels are compiled for the CPU.
#pragma once

#ifdef WEFT_CUDA_ON_CPU
#include "emulated_ptx.h"
#else

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace weft::kernels {

// d += a b for tiles A [16,16] and B [16,8] of bf16 with f32 accumulators (mma.sync.m16n8k16). With
// group = lane / 4 and pair = lane % 4, two bf16 a register (the lower column or row in the lower
// half):
//   a[0] = A[group][2 pair ..], a[1] = A[group+8][2 pair ..], a[2] = A[group][2 pair + 8 ..], a[3]
//     = A[group+8][2 pair + 8 ..]
//   b[0] = B[2 pair ..][group], b[1] = B[2 pair + 8 ..][group]
//   d[0..1] = D[group][2 pair ..], d[2..3] = D[group+8][2 pair ..]
__device__ __forceinline__ void mma_16x8x16(float (&d)[4], const std::uint32_t (&a)[4],
                                            const std::uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Four (two) 8x8 matrices of 16-bit elements from shared memory; lanes 8i .. 8i+7 give the row
// addresses of matrix i. Lane l gets elements (row l/4, columns 2 (l%4) ..) of each; with `trans`,
// of each transposed (ldmatrix).
__device__ __forceinline__ void ldmatrix_x4(std::uint32_t (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(static_cast<std::uint32_t>(__cvta_generic_to_shared(row)))
               : "memory");
}
__device__ __forceinline__ void ldmatrix_x4_trans(std::uint32_t (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(static_cast<std::uint32_t>(__cvta_generic_to_shared(row)))
               : "memory");
}
__device__ __forceinline__ void ldmatrix_x2(std::uint32_t (&r)[2], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];"
               : "=r"(r[0]), "=r"(r[1])
               : "r"(static_cast<std::uint32_t>(__cvta_generic_to_shared(row)))
               : "memory");
}
__device__ __forceinline__ void ldmatrix_x2_trans(std::uint32_t (&r)[2], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];"
               : "=r"(r[0]), "=r"(r[1])
               : "r"(static_cast<std::uint32_t>(__cvta_generic_to_shared(row)))
               : "memory");
}

// 16 bytes from global to shared memory without registers (cp.async); zeros instead where `valid`
// is false.
__device__ __forceinline__ void cp_async_16(void* shared, const void* global, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(
                   static_cast<std::uint32_t>(__cvta_generic_to_shared(shared))),
               "l"(global), "r"(valid ? 16 : 0)
               : "memory");
}
__device__ __forceinline__ void cp_async_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
// Waits until at most `pending` of this thread's groups are under way; others' need a
// __syncthreads() after it.
template <int pending>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}

// 2^x, approximate to 2 ulp (ex2.approx).
__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 1/x, approximate to 1 ulp; 0 for an infinite x and, as the result would be subnormal, beyond
// 2^126 (rcp.approx).
__device__ __forceinline__ float rcp_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 890
// Both as bytes in e4m3, `low` in the lower one: to nearest, ties to even, 448 past 448, 0x7f of
// NaN (cvt.rn.satfinite.e4m3x2.f32).
__device__ __forceinline__ std::uint16_t e4m3_pair(float low, float high) {
  std::uint16_t pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  return pair;
}
#endif

}  // namespace weft::kernels

#endif
