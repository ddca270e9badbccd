// Seconds on a monotonic clock.
#pragma once

#include <chrono>

namespace weft {

inline double now_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace weft
