// Operations that take memory inside themselves: blocks of the current arena, given back at their end. A walk through a
// planning arena takes the same blocks, so that the peak it finds is that of the run.
#pragma once

#include "ops/dispatch.h"

namespace weft::ops {

// Whether the current arena only plans: an operation then takes its blocks and looks at no value.
inline bool planning() { return Arena::has_current() && Arena::current().is_planning(); }

template <class Signature>
class ScratchOp;

// While planning, the CPU side is called all the same. For a GPU, which need not be here, `cuda_plan` takes what the CUDA side
// would.
template <class... A>
class ScratchOp<void(A...)> {
 public:
  using Side = void (*)(A...);
  constexpr ScratchOp(const char* name, Side v3, Side v4, Side cuda, Side cuda_plan)
      : op_(name, v3, v4, cuda), v3_(v3), v4_(v4), cuda_plan_(cuda_plan) {}

  void operator()(A... args) const {
    op_(args...);
    if (!planning()) return;
    if (detail::device_of(args...) == DeviceKind::cuda) return cuda_plan_(args...);
    cpu_is_v4() ? v4_(args...) : v3_(args...);
  }

 private:
  Op<void(A...)> op_;
  Side v3_, v4_, cuda_plan_;
};

}  // namespace weft::ops

// As WEFT_OP (ops/dispatch.h); cuda_plan::name is defined beside the operation's shapes, in ops/*.cpp.
#define WEFT_SCRATCH_OP(name, ...) \
  namespace cpu_v3 { \
  std::type_identity_t<__VA_ARGS__> name; \
  } \
  namespace cpu_v4 { \
  std::type_identity_t<__VA_ARGS__> name; \
  } \
  namespace cuda { \
  [[gnu::weak]] std::type_identity_t<__VA_ARGS__> name; \
  } \
  namespace cuda_plan { \
  std::type_identity_t<__VA_ARGS__> name; \
  } \
  inline const ScratchOp<__VA_ARGS__> name { \
#name, &cpu_v3::name, &cpu_v4::name, &cuda::name, &cuda_plan::name \
  }
