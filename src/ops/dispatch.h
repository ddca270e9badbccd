// How an operation finds its side. WEFT_OP in a header declares the operation once for every side and makes
// the callable that picks one; ops/cpu/*.cpp defines it inside WEFT_CPU_BEGIN/END (compiled once per
// instruction set), kernels/*.cu in namespace weft::ops::cuda.
//
//   WEFT_OP(silu_forward, void(const Tensor& x, Tensor& y));
#pragma once

#include <type_traits>

#include "core/arena.h"
#include "core/tensor.h"

namespace weft::ops {

// True on processors with AVX-512 F, BW, CD, DQ and VL (x86-64-v4).
bool cpu_is_v4();

template <class Signature>
class Op;

template <class R, class... A>
class Op<R(A...)> {
 public:
  constexpr Op(R (*v3)(A...), R (*v4)(A...)) : v3_(v3), v4_(v4) {}

  // A planning arena follows sizes only: nothing runs.
  R operator()(A... args) const {
    if (Arena::has_current() && Arena::current().is_planning()) return R();
    return cpu_is_v4() ? v4_(args...) : v3_(args...);
  }

 private:
  R (*v3_)(A...);
  R (*v4_)(A...);
};

}  // namespace weft::ops

#define WEFT_OP(name, ...)                                                                         \
  namespace cpu_v3 {                                                                               \
  std::type_identity_t<__VA_ARGS__> name;                                                          \
  }                                                                                                \
  namespace cpu_v4 {                                                                               \
  std::type_identity_t<__VA_ARGS__> name;                                                          \
  }                                                                                                \
  inline constexpr Op<__VA_ARGS__> name { &cpu_v3::name, &cpu_v4::name }

// Around the definitions in ops/cpu/*.cpp; WEFT_ISA is v3 or v4, set by the build.
#define WEFT_CPU_CAT_(a, b) a##b
#define WEFT_CPU_CAT(a, b) WEFT_CPU_CAT_(a, b)
#define WEFT_CPU_BEGIN namespace weft::ops::WEFT_CPU_CAT(cpu_, WEFT_ISA) {
#define WEFT_CPU_END }
