// CUDA's qualifiers and vector types for a host compiler. Part of cuda_runtime.h.
#pragma once

#include <cstddef>
#include <cstdint>

#define __global__
#define __device__
#define __host__
#define __constant__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(n) alignas(n)
// __noinline__ is not defined: the C++ library spells an attribute so. __shared__ is not either: a
// variable of it would be one for all blocks; kernels take shared_memory<T>().

// Alignments are CUDA's, so that a misplaced 16-byte access shows where the compiler uses aligned
// instructions.
#define EMULATED_VECTORS(T, name, a2, a4) \
  struct name##1 { \
    T x; \
  }; \
  struct alignas(a2) name##2 { \
    T x, y; \
  }; \
  struct name##3 { \
    T x, y, z; \
  }; \
  struct alignas(a4) name##4 { \
    T x, y, z, w; \
  }; \
  inline name##1 make_##name##1(T x) { return {x}; } \
  inline name##2 make_##name##2(T x, T y) { return {x, y}; } \
  inline name##3 make_##name##3(T x, T y, T z) { return {x, y, z}; } \
  inline name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }
EMULATED_VECTORS(signed char, char, 2, 4)
EMULATED_VECTORS(unsigned char, uchar, 2, 4)
EMULATED_VECTORS(short, short, 4, 8)
EMULATED_VECTORS(unsigned short, ushort, 4, 8)
EMULATED_VECTORS(int, int, 8, 16)
EMULATED_VECTORS(unsigned int, uint, 8, 16)
EMULATED_VECTORS(long long, longlong, 16, 16)
EMULATED_VECTORS(unsigned long long, ulonglong, 16, 16)
EMULATED_VECTORS(float, float, 8, 16)
EMULATED_VECTORS(double, double, 16, 16)
#undef EMULATED_VECTORS

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
  constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
  constexpr dim3(uint3 v) : x(v.x), y(v.y), z(v.z) {}
};
