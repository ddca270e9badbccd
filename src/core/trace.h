// What this rank did and when, for `run.trace`: spans in a ring in memory, which
// train/metrics/run_trace.h writes as one file for all ranks. While off, it costs one predictable
// branch.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "core/clock.h"

namespace weft::trace {

// The rows of a rank in the picture.
enum class Lane : std::uint8_t { step, compute, wait, communication, data, checkpoint };
constexpr int lanes = 6;

struct Span {
  const char* name;  // lives for ever: a literal
  Lane lane;
  double begin, end;     // now_seconds() of this rank
  std::int64_t arg;      // step, bucket or bytes: what `arg_name` says
  const char* arg_name;  // a literal, or null
};

extern std::atomic<bool> enabled;
// Turns tracing on with room for `spans`; the oldest are overwritten when it is full.
void start(std::size_t spans = 1 << 18);
void stop();
// Thread-safe.
void add(const Span& span);
// All spans so far, in order of their ends.
std::vector<Span> spans();

// A span from here to the end of the scope.
class Scope {
 public:
  Scope(const char* name, Lane lane, std::int64_t arg = 0, const char* arg_name = nullptr)
      : span_{name, lane, 0, 0, arg, arg_name}, on_(enabled.load(std::memory_order_relaxed)) {
    if (on_) span_.begin = now_seconds();
  }
  ~Scope() {
    if (!on_) return;
    span_.end = now_seconds();
    add(span_);
  }
  Scope(const Scope&) = delete;
  Scope& operator=(const Scope&) = delete;

 private:
  Span span_;
  bool on_;
};

}  // namespace weft::trace
