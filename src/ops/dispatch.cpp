#include "ops/dispatch.h"

#include <cstdlib>
#include <string_view>

#include "core/clock.h"

namespace weft::ops {
namespace {

OpTime* current_entry = nullptr;

}  // namespace

namespace detail {

Profile* active_profile = nullptr;

Timer::Timer(const char* name) : entry_(&(*active_profile)[name]), start_(now_seconds()) {
  current_entry = entry_;
}

Timer::~Timer() {
  entry_->seconds += now_seconds() - start_;
  ++entry_->calls;
  current_entry = nullptr;
}

void add_flops(double flops) {
  if (current_entry != nullptr) current_entry->flops += flops;
}

}  // namespace detail

void set_profile(Profile* profile) { detail::active_profile = profile; }

bool cpu_is_v4() {
  static const bool v4 = [] {
    const char* asked = std::getenv("WEFT_CPU_ISA");
    return __builtin_cpu_supports("x86-64-v4") > 0 &&
           (asked == nullptr || std::string_view(asked) != "v3");
  }();
  return v4;
}

}  // namespace weft::ops
