#include "ops/dispatch.h"

#include <cstdlib>
#include <string_view>

#include <vector>

#include "core/clock.h"
#include "core/error.h"

namespace weft::ops {
namespace {

thread_local bool in_operation = false;

// Operations on a GPU end later than their calls: their marks are read when the profile ends, or
// when they have become many.
struct OnDevice {
  OpTime* entry;
  DeviceEvent begin, end;
};
std::vector<OnDevice> on_device;
constexpr std::size_t most_marks = 1 << 14;

void read_marks() {
  for (const OnDevice& op : on_device) {
    device_runtime().synchronize(op.end);
    op.entry->seconds += device_runtime().seconds(op.begin, op.end);
  }
  on_device.clear();
}

DeviceEvent mark() { return on_cuda() ? device_runtime().record(Stream::compute) : DeviceEvent(); }

}  // namespace

namespace detail {

thread_local Profile* active_profile = nullptr;
OpWatch* op_watch = nullptr;

Timer::Timer(const char* name, const Cost& cost, std::span<const Tensor> tensors)
    : entry_(nullptr), start_(0) {
  if (in_operation) return;
  std::string row = name;
  bool bf16 = false;
  for (const Tensor& t : tensors) {
    if (!t.defined()) continue;
    bf16 |= t.dtype() == DType::bf16;
    row += " " + t.shape().str();
  }
  if (bf16) row += " bf16";
  entry_ = &(*active_profile)[row];
  if (entry_->calls++ == 0) entry_->name = bf16 ? fmt::format("{} bf16", name) : name;
  entry_->bf16 = bf16;
  entry_->flops += cost.operations;
  entry_->bytes += cost.bytes;
  begin_ = mark();  // may throw: then no operation has begun
  start_ = now_seconds();
  in_operation = true;
}

Timer::~Timer() {
  if (entry_ == nullptr) return;
  try {
    if (begin_)
      on_device.push_back({entry_, begin_, mark()});
    else
      entry_->seconds += now_seconds() - start_;
    if (on_device.size() >= most_marks) read_marks();
  } catch (const Error&) {  // the GPU has failed: the operation's own error, or the next, says so
  }
  in_operation = false;
}

void no_cuda_side(const char* name) {
  throw Error(Exit::internal, fmt::format("operation {} has no CUDA side in this build", name),
              "this is a bug in weft, please report it with the log", __FILE__, __LINE__);
}

}  // namespace detail

void set_profile(Profile* profile) {
  read_marks();
  detail::active_profile = profile;
}

void set_op_watch(OpWatch* watch) { detail::op_watch = watch; }

#ifdef __x86_64__

namespace {
std::string_view asked_isa() {
  const char* asked = std::getenv("WEFT_CPU_ISA");
  return asked != nullptr ? asked : "";
}
}  // namespace

bool cpu_is_v4() {
  static const bool v4 = __builtin_cpu_supports("x86-64-v4") > 0 && asked_isa() != "v3";
  return v4;
}

bool cpu_multiplies_bf16() {
  static const bool yes =
      cpu_is_v4() && __builtin_cpu_supports("avx512bf16") > 0 && asked_isa() != "v4";
  return yes;
}

const char* cpu_instructions() { return cpu_is_v4() ? "AVX-512" : "AVX2"; }

#else

bool cpu_is_v4() { return false; }
bool cpu_multiplies_bf16() { return false; }
#ifdef __aarch64__
const char* cpu_instructions() { return "NEON"; }
#else
const char* cpu_instructions() { return "generic"; }
#endif

#endif

}  // namespace weft::ops
