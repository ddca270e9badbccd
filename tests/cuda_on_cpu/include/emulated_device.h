// What device code sees: indices, barriers, warp functions, atomics, arithmetic. Part of
// cuda_runtime.h. The threads of a block are fibers of one OS thread (fibers.cpp) and blocks run
// one after another, so plain memory accesses are the atomics, and the indices are plain variables
// that a switch between fibers sets.
#pragma once

#include <bit>
#include <cmath>
#include <cstring>
#include <type_traits>

#include "emulated_types.h"

extern uint3 threadIdx, blockIdx;
extern dim3 blockDim, gridDim;
constexpr int warpSize = 32;

namespace emulation {

// Ends the process with one line "cuda_on_cpu: MESSAGE, in kernel K block B thread T" and SIGABRT.
[[noreturn]] void die(const char* format, ...) __attribute__((format(printf, 1, 2)));

// Works on what all lanes brought; lanes[i] is lane i's, null outside `mask`.
using Combine = void (*)(void* const* lanes, unsigned mask);
// A warp function: returns once every lane of `mask` has come with the same `combine`, which is
// called once. A lane that the block does not have, that has ended or that waits elsewhere is an
// error.
void collective(unsigned mask, const char* what, Combine combine, void* lane_data);

enum class Vote { none, count, all, any };
int barrier(Vote vote, int predicate);
unsigned lane();
unsigned live_lanes();
void* shared_base();

template <class T>
struct Exchange {
  T value;
  T result;
  int from;  // the lane to read
};

template <class T>
void exchange(void* const* lanes, unsigned mask) {
  for (int i = 0; i < 32; ++i) {
    if ((mask >> i & 1) == 0) continue;
    auto* mine = static_cast<Exchange<T>*>(lanes[i]);
    if ((mask >> mine->from & 1) == 0)
      die("lane %d shuffles from lane %d, which is not in the mask %08x", i, mine->from, mask);
    mine->result = static_cast<Exchange<T>*>(lanes[mine->from])->value;
  }
}

template <class T>
T shuffle(unsigned mask, const char* what, T value, int from) {
  static_assert(std::is_trivially_copyable_v<T> && sizeof(T) <= 16);
  Exchange<T> x{value, value, from};
  collective(mask, what, exchange<T>, &x);
  return x.result;
}

}  // namespace emulation

namespace weft::kernels {
// The block's dynamic shared memory (kernels/launch.cuh): 1024-byte aligned, poisoned before each
// block, fenced behind.
template <class T>
T* shared_memory() {
  return static_cast<T*>(emulation::shared_base());
}
}  // namespace weft::kernels

// Barriers and fences.
inline void __syncthreads() { emulation::barrier(emulation::Vote::none, 0); }
inline int __syncthreads_count(int p) { return emulation::barrier(emulation::Vote::count, p); }
inline int __syncthreads_and(int p) { return emulation::barrier(emulation::Vote::all, p); }
inline int __syncthreads_or(int p) { return emulation::barrier(emulation::Vote::any, p); }
inline void __syncwarp(unsigned mask = 0xffffffffu) {
  emulation::collective(
      mask, "__syncwarp", [](void* const*, unsigned) {}, nullptr);
}
inline void __threadfence() {}
inline void __threadfence_block() {}
inline void __threadfence_system() {}
inline void __nanosleep(unsigned) {}
inline void __trap() { emulation::die("__trap() reached"); }

// Shuffles. Segments of `width` lanes; a lane outside its segment reads itself.
template <class T>
T __shfl_sync(unsigned mask, T v, int from, int width = 32) {
  const int l = static_cast<int>(emulation::lane());
  return emulation::shuffle(mask, "__shfl_sync", v, (l & ~(width - 1)) | (from & (width - 1)));
}
template <class T>
T __shfl_xor_sync(unsigned mask, T v, int lanes, int width = 32) {
  const int l = static_cast<int>(emulation::lane()), from = l ^ lanes;
  // CUDA lets a lane read a segment before its own, not one behind.
  return emulation::shuffle(mask, "__shfl_xor_sync", v, from > (l | (width - 1)) ? l : from);
}
template <class T>
T __shfl_down_sync(unsigned mask, T v, unsigned lanes, int width = 32) {
  const int l = static_cast<int>(emulation::lane()), from = l + static_cast<int>(lanes);
  return emulation::shuffle(mask, "__shfl_down_sync", v, from > (l | (width - 1)) ? l : from);
}
template <class T>
T __shfl_up_sync(unsigned mask, T v, unsigned lanes, int width = 32) {
  const int l = static_cast<int>(emulation::lane()), from = l - static_cast<int>(lanes);
  return emulation::shuffle(mask, "__shfl_up_sync", v, from < (l & ~(width - 1)) ? l : from);
}

// Votes and reductions.
unsigned __ballot_sync(unsigned mask, int predicate);
inline int __any_sync(unsigned mask, int p) { return __ballot_sync(mask, p) != 0; }
inline int __all_sync(unsigned mask, int p) { return __ballot_sync(mask, p) == mask; }
unsigned __match_any_sync(unsigned mask, unsigned value);
inline unsigned __match_any_sync(unsigned mask, int v) {
  return __match_any_sync(mask, static_cast<unsigned>(v));
}
unsigned __reduce_add_sync(unsigned mask, unsigned value);
unsigned __reduce_max_sync(unsigned mask, unsigned value);
unsigned __reduce_min_sync(unsigned mask, unsigned value);
int __reduce_add_sync(unsigned mask, int value);
int __reduce_max_sync(unsigned mask, int value);
int __reduce_min_sync(unsigned mask, int value);
// The lanes that have not ended: fibers do not know who would be converged.
inline unsigned __activemask() { return emulation::live_lanes(); }

// Atomics: nobody runs in between.
#define EMULATED_ATOMIC(name, T, expression) \
  inline T name(T* p, T v) { \
    const T old = *p; \
    *p = static_cast<T>(expression); \
    return old; \
  }
#define EMULATED_INTEGER_ATOMICS(T) \
  EMULATED_ATOMIC(atomicAdd, T, old + v) \
  EMULATED_ATOMIC(atomicMax, T, old < v ? v : old) \
  EMULATED_ATOMIC(atomicMin, T, v < old ? v : old) \
  EMULATED_ATOMIC(atomicExch, T, v) \
  EMULATED_ATOMIC(atomicOr, T, old | v) \
  EMULATED_ATOMIC(atomicAnd, T, old& v) \
  EMULATED_ATOMIC(atomicXor, T, old ^ v) \
  inline T atomicCAS(T* p, T expected, T v) { \
    const T old = *p; \
    if (old == expected) *p = v; \
    return old; \
  }
EMULATED_INTEGER_ATOMICS(int)
EMULATED_INTEGER_ATOMICS(unsigned)
EMULATED_INTEGER_ATOMICS(unsigned long long)
EMULATED_ATOMIC(atomicAdd, float, old + v)
EMULATED_ATOMIC(atomicAdd, double, old + v)
EMULATED_ATOMIC(atomicExch, float, v)
EMULATED_ATOMIC(atomicSub, int, old - v)
EMULATED_ATOMIC(atomicSub, unsigned, old - v)
// Counts up to v and starts again at 0.
EMULATED_ATOMIC(atomicInc, unsigned, old >= v ? 0u : old + 1)
#undef EMULATED_INTEGER_ATOMICS
#undef EMULATED_ATOMIC

// Memory accesses with cache hints.
template <class T>
T __ldg(const T* p) {
  return *p;
}
template <class T>
T __ldcg(const T* p) {
  return *p;
}
template <class T>
T __ldcs(const T* p) {
  return *p;
}
template <class T>
T __ldlu(const T* p) {
  return *p;
}
template <class T>
void __stcg(T* p, T v) {
  *p = v;
}
template <class T>
void __stcs(T* p, T v) {
  *p = v;
}
template <class T>
void __stwt(T* p, T v) {
  *p = v;
}
inline std::size_t __cvta_generic_to_shared(const void* p) {
  return static_cast<std::size_t>(static_cast<const char*>(p) -
                                  static_cast<const char*>(emulation::shared_base()));
}

// Bits.
inline int __float_as_int(float x) { return std::bit_cast<int>(x); }
inline unsigned __float_as_uint(float x) { return std::bit_cast<unsigned>(x); }
inline float __int_as_float(int x) { return std::bit_cast<float>(x); }
inline float __uint_as_float(unsigned x) { return std::bit_cast<float>(x); }
inline long long __double_as_longlong(double x) { return std::bit_cast<long long>(x); }
inline double __longlong_as_double(long long x) { return std::bit_cast<double>(x); }
inline int __popc(unsigned x) { return std::popcount(x); }
inline int __popcll(unsigned long long x) { return std::popcount(x); }
inline int __clz(int x) { return std::countl_zero(static_cast<unsigned>(x)); }
inline int __ffs(int x) { return __builtin_ffs(x); }
unsigned __byte_perm(unsigned x, unsigned y, unsigned selector);
inline unsigned __umulhi(unsigned a, unsigned b) {
  return static_cast<unsigned>(static_cast<unsigned long long>(a) * b >> 32);
}
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
  return static_cast<unsigned long long>(static_cast<unsigned __int128>(a) * b >> 64);
}
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned n) {
  n &= 31;
  return n == 0 ? high : high << n | low >> (32 - n);
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned n) {
  n &= 31;
  return n == 0 ? low : low >> n | high << (32 - n);
}

// Arithmetic. The fast functions are exact here: what they may lose on a GPU does not show.
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline double rsqrt(double x) { return 1.0 / std::sqrt(x); }
inline float __expf(float x) { return std::exp(x); }
inline float __exp2f(float x) { return std::exp2(x); }
inline float __logf(float x) { return std::log(x); }
inline float __log2f(float x) { return std::log2(x); }
inline float __sinf(float x) { return std::sin(x); }
inline float __cosf(float x) { return std::cos(x); }
inline float __powf(float x, float y) { return std::pow(x, y); }
inline float __tanhf(float x) { return std::tanh(x); }
inline float __fdividef(float x, float y) { return x / y; }
inline float __fdiv_rn(float x, float y) { return x / y; }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __frsqrt_rn(float x) { return rsqrtf(x); }
inline float __fsqrt_rn(float x) { return std::sqrt(x); }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline double __fma_rn(double a, double b, double c) { return std::fma(a, b, c); }
inline float __saturatef(float x) { return x > 0.0f ? (x < 1.0f ? x : 1.0f) : 0.0f; }
inline void __sincosf(float x, float* s, float* c) { *s = std::sin(x), *c = std::cos(x); }
inline void sincospif(float x, float* s, float* c) {
  const double angle = 3.14159265358979323846 * static_cast<double>(x);
  *s = static_cast<float>(std::sin(angle)), *c = static_cast<float>(std::cos(angle));
}
// No fused multiply-add may be made of these on either side; a volatile keeps the host compiler
// from it too.
inline float __fadd_rn(float a, float b) {
  volatile float r = a + b;
  return r;
}
inline float __fsub_rn(float a, float b) {
  volatile float r = a - b;
  return r;
}
inline float __fmul_rn(float a, float b) {
  volatile float r = a * b;
  return r;
}
inline double __dadd_rn(double a, double b) {
  volatile double r = a + b;
  return r;
}
inline double __dmul_rn(double a, double b) {
  volatile double r = a * b;
  return r;
}
inline int __float2int_rn(float x) { return static_cast<int>(std::nearbyint(x)); }
inline int __float2int_rd(float x) { return static_cast<int>(std::floor(x)); }
inline int __float2int_ru(float x) { return static_cast<int>(std::ceil(x)); }
inline int __float2int_rz(float x) { return static_cast<int>(x); }
inline unsigned __float2uint_rn(float x) { return static_cast<unsigned>(std::nearbyint(x)); }
inline float __int2float_rn(int x) { return static_cast<float>(x); }
inline float __uint2float_rn(unsigned x) { return static_cast<float>(x); }
inline float __double2float_rn(double x) { return static_cast<float>(x); }

// CUDA's global min and max for every pair of arithmetic types.
template <class A, class B>
requires(std::is_arithmetic_v<A>&& std::is_arithmetic_v<B>) constexpr std::common_type_t<A, B> min(
    A a, B b) {
  using T = std::common_type_t<A, B>;
  return static_cast<T>(b) < static_cast<T>(a) ? static_cast<T>(b) : static_cast<T>(a);
}
template <class A, class B>
requires(std::is_arithmetic_v<A>&& std::is_arithmetic_v<B>) constexpr std::common_type_t<A, B> max(
    A a, B b) {
  using T = std::common_type_t<A, B>;
  return static_cast<T>(a) < static_cast<T>(b) ? static_cast<T>(b) : static_cast<T>(a);
}

// A clock that only goes forward: the emulation has no cycles.
long long clock64();
