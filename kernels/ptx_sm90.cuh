// Hopper's own instructions as functions (PTX ISA 8.0 and later, compute capability 9.0a):
// mbarriers, bulk copies into shared memory, matrix products of a warpgroup. Includers write device
// code only where WEFT_SM90 is defined: the other architectures get empty kernels.
// tests/cuda_on_cpu/include/emulated_ptx_sm90.h gives the same functions by their documented
// meaning where the kernels are compiled for the CPU.
#pragma once

#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || defined(WEFT_CUDA_ON_CPU)
#define WEFT_SM90
#endif

#ifdef WEFT_CUDA_ON_CPU
#include "emulated_ptx_sm90.h"
#endif

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace weft::kernels::sm90 {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

__device__ __forceinline__ std::uint32_t shared_address(const void* p) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(p));
}

// threadIdx.x, read where the call stands: what is made of it is not kept in registers over loops
// that need them all.
__device__ __forceinline__ int thread_here() {
  int x;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
  return x;
}

// ---- mbarrier: a phase ends when `count` threads have arrived and all bytes that they announced
// have come. Phases are numbered from 0; a wait for `parity` returns once the phase of that parity
// has ended.
__device__ __forceinline__ void mbarrier_init(std::uint64_t* barrier, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(count)
               : "memory");
}
// Makes initialised barriers visible to bulk copies; a __syncthreads() follows for the other
// threads.
__device__ __forceinline__ void mbarrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
// Arrives and announces `bytes` that bulk copies will bring.
__device__ __forceinline__ void mbarrier_arrive_expect(std::uint64_t* barrier, int bytes) {
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
      "r"(bytes)
      : "memory");
}
__device__ __forceinline__ void mbarrier_arrive(std::uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier))
               : "memory");
}
__device__ __forceinline__ void mbarrier_wait(std::uint64_t* barrier, int parity) {
  int done;
  do {
    asm volatile(
        "{\n.reg .pred p;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.b32 %0, 1, 0, p;\n}\n"
        : "=r"(done)
        : "r"(shared_address(barrier)), "r"(parity)
        : "memory");
  } while (done == 0);
}

// ---- Bulk copies from global to shared memory, by the asynchronous proxy; `barrier` counts their
// bytes. The box of `map` at (column, head, row, sequence); what lies outside the tensor becomes
// zeros.
__device__ __forceinline__ void copy_box(void* to, const CUtensorMap* map, std::uint64_t* barrier,
                                         int column, int head, int row, int sequence) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(shared_address(to)),
      "l"(reinterpret_cast<std::uint64_t>(map)), "r"(shared_address(barrier)), "r"(column),
      "r"(head), "r"(row), "r"(sequence)
      : "memory");
}
// `bytes` in one piece; both addresses and the size are multiples of 16.
__device__ __forceinline__ void copy_bulk(void* to, const void* from, int bytes,
                                          std::uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(shared_address(to)),
      "l"(from), "r"(bytes), "r"(shared_address(barrier))
      : "memory");
}

// Makes what this thread has stored in shared memory visible to products and bulk copies, which
// come after a barrier that the thread passes.
__device__ __forceinline__ void async_proxy_fence() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Stores four 8x8 matrices of 16-bit elements in shared memory, the inverse of ldmatrix_x4
// (ptx.cuh): lanes 8i .. 8i+7 give the row addresses of matrix i, lane l has elements (row l/4,
// columns 2 (l%4) ..) of each.
__device__ __forceinline__ void stmatrix_x4(void* row, const std::uint32_t (&r)[4]) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(shared_address(row)),
      "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
      : "memory");
}

// Adds to four floats in device memory, each for itself, in any order with others' additions; `to`
// is a multiple of 16 bytes. What is there may be read after the kernel.
__device__ __forceinline__ void add_four(float* to, float a, float b, float c, float d) {
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1,%2,%3,%4};" ::"l"(to), "f"(a), "f"(b),
               "f"(c), "f"(d)
               : "memory");
}

// ---- Warpgroups: 128 threads from a multiple of 128 on.
// Registers of each thread of this warpgroup from here on; a multiple of 8.
template <int registers>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(registers));
}
template <int registers>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(registers));
}
// Barrier `id` (0 is __syncthreads) of `threads` threads, those that wait and those that only
// arrive together.
__device__ __forceinline__ void named_wait(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void named_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// ---- wgmma. Between a product and the wait for its group nothing may touch its accumulators, its
// A registers or the shared memory of its operands. Orders register accesses before and products
// after it: needed before the first product and after registers of one have been written.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Until at most `pending` of the groups are under way.
template <int pending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}
// Keeps the compiler from moving accesses of these registers across this point: a product's asm
// statement says nothing about when it ends.
template <int n>
__device__ __forceinline__ void keep_in_place(float (&x)[n]) {
#pragma unroll
  for (int i = 0; i < n; ++i) asm volatile("" : "+f"(x[i])::"memory");
}
template <int n>
__device__ __forceinline__ void keep_in_place(std::uint32_t (&x)[n]) {
#pragma unroll
  for (int i = 0; i < n; ++i) asm volatile("" : "+r"(x[i])::"memory");
}

// d [64, n] (+)= a [64,16] b [16,n] in bf16 with f32 accumulators, spread as mma_16x8x16 spreads
// [16, n]: warp w of the warpgroup has rows 16 w .., and d[4 j .. 4 j + 3] are its accumulators of
// columns 8 j ... `accumulate` false overwrites d.
#define WEFT_F4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define WEFT_F16(i) WEFT_F4(i), WEFT_F4(i + 4), WEFT_F4(i + 8), WEFT_F4(i + 12)
#define WEFT_F32 WEFT_F16(0), WEFT_F16(16)
#define WEFT_F36 WEFT_F32, WEFT_F4(32)
#define WEFT_F56 WEFT_F32, WEFT_F16(32), WEFT_F4(48), WEFT_F4(52)
#define WEFT_F64 WEFT_F32, WEFT_F16(32), WEFT_F16(48)
#define WEFT_R32 \
  "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%" \
  "25," \
  "%26,%27,%28,%29,%30,%31"
#define WEFT_R36 WEFT_R32 ",%32,%33,%34,%35"
#define WEFT_R56 \
  WEFT_R36 \
  ",%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55"
#define WEFT_R64 WEFT_R56 ",%56,%57,%58,%59,%60,%61,%62,%63"

template <int n>
struct Wgmma;

// Both operands from shared memory, or A from registers, spread as mma_16x8x16 wants it. What is in
// shared memory is summed over its columns (describe_rows), or, where `by_rows`, over its rows
// (describe_columns).
#define WEFT_WGMMA(n, accumulators, operands, o0, o1, o2, o3, o4, o5, o6) \
  template <> \
  struct Wgmma<n> { \
    template <bool a_by_rows = false, bool b_by_rows = false> \
    static __device__ __forceinline__ void from_shared(float (&d)[n / 2], std::uint64_t a, \
                                                       std::uint64_t b, bool accumulate) { \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " o2 \
                   ", 0;\n" \
                   "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32.bf16.bf16 " accumulators \
                   "}, " o0 ", " o1 ", p, 1, 1, " o3 ", " o4 ";\n}\n" \
                   : operands \
                   : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)), "n"(a_by_rows ? 1 : 0), \
                     "n"(b_by_rows ? 1 : 0)); \
    } \
    template <bool by_rows> \
    static __device__ __forceinline__ void from_registers(float (&d)[n / 2], \
                                                          const std::uint32_t (&a)[4], \
                                                          std::uint64_t b, bool accumulate) { \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " o5 \
                   ", 0;\n" \
                   "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32.bf16.bf16 " accumulators \
                   "}, {" o0 "," o1 "," o2 "," o3 "}, " o4 ", p, 1, 1, " o6 ";\n}\n" \
                   : operands \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), \
                     "r"(static_cast<int>(accumulate)), "n"(by_rows ? 1 : 0)); \
    } \
  };
WEFT_WGMMA(64, WEFT_R32, WEFT_F32, "%32", "%33", "%34", "%35", "%36", "%37", "%38")
WEFT_WGMMA(72, WEFT_R36, WEFT_F36, "%36", "%37", "%38", "%39", "%40", "%41", "%42")
WEFT_WGMMA(112, WEFT_R56, WEFT_F56, "%56", "%57", "%58", "%59", "%60", "%61", "%62")
WEFT_WGMMA(128, WEFT_R64, WEFT_F64, "%64", "%65", "%66", "%67", "%68", "%69", "%70")
#undef WEFT_F4
#undef WEFT_F16
#undef WEFT_F32
#undef WEFT_F36
#undef WEFT_F56
#undef WEFT_F64
#undef WEFT_R32
#undef WEFT_R36
#undef WEFT_R56
#undef WEFT_R64
#undef WEFT_WGMMA
#endif

#ifdef WEFT_SM90
// Matrix descriptors (PTX ISA, "Matrix Descriptor Format"; all counts in units of 16 bytes):
//   bits 0-13 start address, 16-29 leading dimension byte offset, 32-45 stride dimension byte
//     offset,
//   49-51 base offset (0: atoms lie at multiples of 1024 bytes), 62-63 swizzle (1: 128 bytes).
// Tiles here are [atoms][rows][64 columns] of bf16: rows of 128 bytes, eight of them an atom of
// 1024 bytes, in which the 16-byte piece p of row r lies at p ^ (r % 8) - what a bulk tensor copy
// with CU_TENSOR_MAP_SWIZZLE_128B writes.
//
// Columns are the dimension that the product sums over ("K-major"): eight rows further is 1024
// bytes further (stride offset); the leading offset is not used with a swizzle. The next 16 columns
// start 32 bytes further within the atom.
__device__ __forceinline__ std::uint64_t describe_rows(const void* tile) {
  return (static_cast<std::uint64_t>(shared_address(tile)) & 0x3ffff) >> 4 |
         std::uint64_t{1} << 16 | std::uint64_t{1024 >> 4} << 32 | std::uint64_t{1} << 62;
}
// Rows are the dimension that the product sums over ("MN-major", transposed): eight rows further is
// 1024 bytes further (stride offset), 64 columns further is the next atom column (leading offset),
// `rows` x 128 bytes away. The next 16 rows start 2048 bytes further.
template <int rows>
__device__ __forceinline__ std::uint64_t describe_columns(const void* tile) {
  static_assert(rows * 128 >> 4 < 1 << 14);
  return (static_cast<std::uint64_t>(shared_address(tile)) & 0x3ffff) >> 4 |
         std::uint64_t{rows * 128 >> 4} << 16 | std::uint64_t{1024 >> 4} << 32 |
         std::uint64_t{1} << 62;
}
#endif

}  // namespace weft::kernels::sm90
