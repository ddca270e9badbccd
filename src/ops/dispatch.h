// Selects the CPU or CUDA implementation of an operation. WEFT_OP in a header declares it once for
// all sides, with what a call costs (ops/cost.h), and makes the callable that picks one;
// ops/cpu/*.cpp defines it inside WEFT_CPU_BEGIN/END (compiled once per instruction set),
// kernels/*.cu in namespace weft::ops::cuda. The CUDA side is a weak symbol: a program that is not
// linked with the kernels has null there, and never a tensor on a GPU.
//
//   WEFT_MEMORY_OP(silu_forward, void(const Tensor& x, Tensor& y));
#pragma once

#include <map>
#include <optional>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include "ops/cost.h"
#include "tensor/tensor.h"

// WEFT_ISA: in ops/cpu/*.cpp alone, the instruction set that the file is compiled for (below).
#if defined(WEFT_ISA) && defined(__x86_64__)
#include <immintrin.h>
#endif

namespace weft::ops {

// Where the time of this thread goes: while a profile is active, every operation adds to it. One
// that another calls counts as part of that, and one that a dry run skips not at all.
struct OpTime {
  std::string name;   // of the operation, and "bf16" if any of its tensors is
  bool bf16 = false;  // any of its tensors
  std::int64_t calls = 0;
  double seconds = 0;
  double flops = 0, bytes = 0;  // of all calls
};
// By name and shapes of the tensors.
using Profile = std::map<std::string, OpTime>;
void set_profile(Profile* profile);  // null: off, after a GPU has done all that it measured

// Notified of every operation that a planning arena skips: its name, its cost, and its tensors,
// which have shapes and types but no values.
class OpWatch {
 public:
  virtual ~OpWatch() = default;
  virtual void met(const std::string& name, const Cost& cost, std::span<const Tensor> tensors) = 0;
  // Also of collectives that a dry run leaves out: "all_to_all", "all_gather" and "all_reduce",
  // with what this rank sends.
  virtual void exchanged(const std::string& collective, double bytes) {}
};
void set_op_watch(OpWatch* watch);  // null: none

namespace detail {
extern thread_local Profile* active_profile;
extern OpWatch* op_watch;
// Adds the time until its end to the active profile.
class Timer {
 public:
  Timer(const char* name, const Cost& cost, std::span<const Tensor> tensors);
  ~Timer();

 private:
  OpTime* entry_;  // null inside another operation
  double start_;
  DeviceEvent begin_;
};

// Those of an operation's arguments that are tensors, undefined ones too.
template <class... Args>
std::vector<Tensor> tensors_of(const Args&... args) {
  std::vector<Tensor> tensors;
  const auto keep = [&](const auto& arg) {
    if constexpr (std::is_convertible_v<decltype(arg), const Tensor&>)
      tensors.push_back(arg);
    else if constexpr (std::is_convertible_v<decltype(arg), std::span<const Tensor>>)
      tensors.insert(tensors.end(), arg.begin(), arg.end());
  };
  (keep(args), ...);
  return tensors;
}

// The cost with the tensors' bytes, where it leaves them out.
inline Cost whole(Cost cost, std::span<const Tensor> tensors) {
  if (cost.bytes >= 0) return cost;
  cost.bytes = 0;
  for (const Tensor& t : tensors) cost.bytes += cost::bytes(t);
  return cost;
}

// The device of the first tensor that is given.
template <class First, class... Rest>
DeviceKind device_of(const First& first, const Rest&... rest) {
  if constexpr (std::is_same_v<First, Tensor>)
    if (first.defined()) return first.device();
  if constexpr (sizeof...(rest) > 0)
    return device_of(rest...);
  else
    return DeviceKind::cpu;
}
[[noreturn]] void no_cuda_side(const char* name);
}  // namespace detail

// True on processors with AVX-512 F, BW, CD, DQ and VL (x86-64-v4), unless the environment says
// WEFT_CPU_ISA=v3: so the AVX2 side can be tested anywhere. Never on another than x86-64.
bool cpu_is_v4();

// True on processors that also have AVX512_BF16, unless WEFT_CPU_ISA says v3 or v4.
bool cpu_multiplies_bf16();

// What the CPU operations of this process are compiled for: "AVX-512", "AVX2", "NEON"; "generic" on
// other processors than x86-64 and 64-bit Arm.
const char* cpu_instructions();

// Whether matrix products on the CPU are oneDNN's, or weft's own (ops/cpu/matmul/tiled.h).
#ifdef __x86_64__
inline constexpr bool products_by_onednn = true;
#else
inline constexpr bool products_by_onednn = false;
#endif

// The one of an operation's two sides that runs here.
template <class F>
F* on_this_cpu(F* v3, F* v4) {
  return cpu_is_v4() ? v4 : v3;
}

template <class Signature>
class Op;

template <class... A>
class Op<void(A...)> {
 public:
  using Side = void (*)(A...);
  constexpr Op(const char* name, Cost (*cost)(A...), Side v3, Side v4, Side cuda)
      : name_(name), cost_(cost), v3_(v3), v4_(v4), cuda_(cuda) {}

  // The side is that of the first tensor. A planning arena follows sizes only: nothing runs.
  void operator()(A... args) const {
    if (Arena::has_current() && Arena::current().is_planning()) {
      if (detail::op_watch == nullptr) return;
      const std::vector<Tensor> tensors = detail::tensors_of(args...);
      return detail::op_watch->met(name_, detail::whole(cost_(args...), tensors), tensors);
    }
    std::optional<detail::Timer> timer;
    if (detail::active_profile != nullptr) {
      const std::vector<Tensor> tensors = detail::tensors_of(args...);
      timer.emplace(name_, detail::whole(cost_(args...), tensors), tensors);
    }
    if (detail::device_of(args...) == DeviceKind::cuda) {
      if (cuda_ == nullptr) detail::no_cuda_side(name_);
      return cuda_(args...);
    }
    return on_this_cpu(v3_, v4_)(args...);
  }

 private:
  const char* name_;
  Cost (*cost_)(A...);
  Side v3_, v4_, cuda_;
};

// Operations that take memory inside themselves: blocks of the current arena, given back at their
// end. A dry run in a planning arena takes the same blocks, so that the peak it finds is that of
// the run.

// Whether the current arena only plans: an operation then takes its blocks and looks at no value.
inline bool planning() { return Arena::has_current() && Arena::current().is_planning(); }

template <class Signature>
class ScratchOp;

// While planning, the CPU side is called all the same, if it `plans`. For a GPU, which need not be
// here, `cuda_plan` takes what the CUDA side would.
template <class... A>
class ScratchOp<void(A...)> {
 public:
  using Side = void (*)(A...);
  constexpr ScratchOp(const char* name, Cost (*cost)(A...), Side v3, Side v4, Side cuda,
                      Side cuda_plan, bool plans)
      : op_(name, cost, v3, v4, cuda), v3_(v3), v4_(v4), cuda_plan_(cuda_plan), plans_(plans) {}

  void operator()(A... args) const {
    op_(args...);
    if (!planning()) return;
    if (detail::device_of(args...) == DeviceKind::cuda) return cuda_plan_(args...);
    if (plans_) on_this_cpu(v3_, v4_)(args...);
  }

 private:
  Op<void(A...)> op_;
  Side v3_, v4_, cuda_plan_;
  bool plans_;
};

}  // namespace weft::ops

// The CPU sides of a function. x86-64 has two, compiled for AVX2 (x86-64-v3) and AVX-512 (v4); any
// other processor has one, on vectors of 128 bits, and is offered it twice.
#ifdef __x86_64__
#define WEFT_CPU_DECLARE(name, ...) \
  namespace cpu_v3 { \
  std::type_identity_t<__VA_ARGS__> name; \
  } \
  namespace cpu_v4 { \
  std::type_identity_t<__VA_ARGS__> name; \
  }
#define WEFT_CPU_SIDES(name) &cpu_v3::name, &cpu_v4::name
#else
#define WEFT_CPU_DECLARE(name, ...) \
  namespace cpu_generic { \
  std::type_identity_t<__VA_ARGS__> name; \
  }
#define WEFT_CPU_SIDES(name) &cpu_generic::name, &cpu_generic::name
#endif

// What follows the signature is the cost of a call: an expression of namespace cost over the
// parameters.
#define WEFT_PARAMETERS_OF_void(...) (__VA_ARGS__)
#define WEFT_OP_SIDES(name, signature, ...) \
  WEFT_CPU_DECLARE(name, signature) \
  namespace cuda { \
  [[gnu::weak]] std::type_identity_t<signature> name; \
  } \
  inline Cost cost_of_##name WEFT_PARAMETERS_OF_##signature { \
    using namespace cost; \
    return __VA_ARGS__; \
  }

#define WEFT_OP(name, signature, ...) \
  WEFT_OP_SIDES(name, signature, __VA_ARGS__) \
  inline const Op<signature> name { #name, &cost_of_##name, WEFT_CPU_SIDES(name), &cuda::name }
// One that memory bounds: each of its tensors is moved once.
#define WEFT_MEMORY_OP(name, signature) WEFT_OP(name, signature, memory_bound())

// As WEFT_OP; cuda_plan::name is defined beside the operation's shapes, in ops/*.cpp.
#define WEFT_SCRATCH_OP(...) WEFT_SCRATCH_OP_(true, __VA_ARGS__)
// The same of one whose CPU side takes no memory.
#define WEFT_CUDA_SCRATCH_OP(...) WEFT_SCRATCH_OP_(false, __VA_ARGS__)
#define WEFT_SCRATCH_OP_(plans, name, signature, ...) \
  WEFT_OP_SIDES(name, signature, __VA_ARGS__) \
  namespace cuda_plan { \
  std::type_identity_t<signature> name; \
  } \
  inline const ScratchOp<signature> name { \
#name, &cost_of_##name, WEFT_CPU_SIDES(name), &cuda::name, &cuda_plan::name, plans \
  }

// Around the definitions in ops/cpu/*.cpp; WEFT_ISA is v3, v4 or generic, set by the build.
#define WEFT_CPU_CAT_(a, b) a##b
#define WEFT_CPU_CAT(a, b) WEFT_CPU_CAT_(a, b)
#define WEFT_CPU_BEGIN namespace weft::ops::WEFT_CPU_CAT(cpu_, WEFT_ISA) {
#define WEFT_CPU_END }
