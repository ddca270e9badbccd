// How an operation finds its side. WEFT_OP in a header declares the operation once for every side and makes
// the callable that picks one; ops/cpu/*.cpp defines it inside WEFT_CPU_BEGIN/END (compiled once per
// instruction set), kernels/*.cu in namespace weft::ops::cuda.
//
//   WEFT_OP(silu_forward, void(const Tensor& x, Tensor& y));
#pragma once

#include <map>
#include <optional>
#include <string>
#include <type_traits>

#include "core/arena.h"
#include "core/tensor.h"

namespace weft::ops {

// Where the time of a step goes: while a profile is active, every operation adds to it under its name.
struct OpTime {
  std::int64_t calls = 0;
  double seconds = 0, flops = 0;
};
using Profile = std::map<std::string, OpTime>;
void set_profile(Profile* profile);  // null: off

namespace detail {
extern Profile* active_profile;
// Adds the time until its end to the active profile.
class Timer {
 public:
  explicit Timer(const char* name);
  ~Timer();

 private:
  OpTime* entry_;
  double start_;
};
// Operations of the matrix products run by the current operation.
void add_flops(double flops);
}  // namespace detail

// True on processors with AVX-512 F, BW, CD, DQ and VL (x86-64-v4), unless the environment says WEFT_CPU_ISA=v3: so the
// AVX2 side can be tested anywhere.
bool cpu_is_v4();

template <class Signature>
class Op;

template <class R, class... A>
class Op<R(A...)> {
 public:
  constexpr Op(const char* name, R (*v3)(A...), R (*v4)(A...)) : name_(name), v3_(v3), v4_(v4) {}

  // A planning arena follows sizes only: nothing runs.
  R operator()(A... args) const {
    if (Arena::has_current() && Arena::current().is_planning()) return R();
    std::optional<detail::Timer> timer;
    if (detail::active_profile != nullptr) timer.emplace(name_);
    return cpu_is_v4() ? v4_(args...) : v3_(args...);
  }

 private:
  const char* name_;
  R (*v3_)(A...);
  R (*v4_)(A...);
};

}  // namespace weft::ops

#define WEFT_OP(name, ...) \
  namespace cpu_v3 { \
  std::type_identity_t<__VA_ARGS__> name; \
  } \
  namespace cpu_v4 { \
  std::type_identity_t<__VA_ARGS__> name; \
  } \
  inline constexpr Op<__VA_ARGS__> name { #name, &cpu_v3::name, &cpu_v4::name }

// Around the definitions in ops/cpu/*.cpp; WEFT_ISA is v3 or v4, set by the build.
#define WEFT_CPU_CAT_(a, b) a##b
#define WEFT_CPU_CAT(a, b) WEFT_CPU_CAT_(a, b)
#define WEFT_CPU_BEGIN namespace weft::ops::WEFT_CPU_CAT(cpu_, WEFT_ISA) {
#define WEFT_CPU_END }
