// V neighbouring elements that move in one access and are computed with as floats.
#pragma once

#include <bit>
#include <cstring>

#include "launch.cuh"

namespace weft::kernels {

// bf16 stays two a register: from an array of bf16 the compiler would make a register of each
// element.
template <class T, int V>
struct alignas(V * sizeof(T) < 16 ? V * sizeof(T) : 16) Vec {
  static_assert(sizeof(T) == 4 || V == 1);
  T v[V];
};
template <int V>
requires(V % 2 == 0) struct alignas(V * 2 < 16 ? V * 2 : 16) Vec<__nv_bfloat16, V> {
  std::uint32_t pairs[V / 2];
};

// Element `i` in units of V.
template <int V, class T>
__device__ __forceinline__ Vec<T, V> load_vec(const T* p, std::int64_t i) {
  return reinterpret_cast<const Vec<T, V>*>(p)[i];
}
template <int V, class T>
__device__ __forceinline__ void store_vec(T* p, std::int64_t i, const Vec<T, V>& x) {
  reinterpret_cast<Vec<T, V>*>(p)[i] = x;
}

template <class T, int V>
__device__ __forceinline__ void unpack(const Vec<T, V>& x, float (&f)[V]) {
  if constexpr (sizeof(T) == 4 || V == 1) {
#pragma unroll
    for (int e = 0; e < V; ++e) f[e] = to_float(x.v[e]);
  } else {
#pragma unroll
    for (int e = 0; e < V; e += 2) {
      f[e] = std::bit_cast<float>(x.pairs[e / 2] << 16);
      f[e + 1] = std::bit_cast<float>(x.pairs[e / 2] & 0xffff0000u);
    }
  }
}

template <class T, int V>
__device__ __forceinline__ Vec<T, V> pack(const float (&f)[V]) {
  Vec<T, V> x;
  if constexpr (sizeof(T) == 4 || V == 1) {
#pragma unroll
    for (int e = 0; e < V; ++e) x.v[e] = from_float<T>(f[e]);
  } else {
#pragma unroll
    for (int e = 0; e < V; e += 2) {
      const __nv_bfloat162 pair = __floats2bfloat162_rn(f[e], f[e + 1]);
      memcpy(&x.pairs[e / 2], &pair, sizeof pair);
    }
  }
  return x;
}

// Whether V elements of each tensor can be one access: its first element is aligned to them. An
// undefined tensor qualifies.
template <int V, class... Tensors>
bool aligned(const Tensors&... t) {
  const auto one = [](const Tensor& x) {
    const std::size_t bytes = V * size_of(x.dtype());
    return reinterpret_cast<std::uintptr_t>(x.raw()) % (bytes < 16 ? bytes : 16) == 0;
  };
  return (one(t) && ...);
}

// Calls f.operator()<V>() where rows of `length` elements of all tensors can move V at a time, else
// f.operator()<1>().
template <int V, class F, class... Tensors>
void by_width(std::int64_t length, F&& f, const Tensors&... t) {
  if (length % V == 0 && aligned<V>(t...))
    f.template operator()<V>();
  else
    f.template operator()<1>();
}
// Calls f.operator()<T, V>() with the type of the first and the widest access that rows of `length`
// elements of all of them allow.
template <class F, class... Tensors>
void by_access(std::int64_t length, F&& f, const Tensor& first, const Tensors&... rest) {
  by_type(first, [&]<class T>() {
    by_width<Pack<T>::size>(
        length, [&]<int V>() { f.template operator()<T, V>(); }, first, rest...);
  });
}

}  // namespace weft::kernels
