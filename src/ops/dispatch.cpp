#include "ops/dispatch.h"

namespace weft::ops {

bool cpu_is_v4() {
  static const bool v4 = __builtin_cpu_supports("x86-64-v4") > 0;
  return v4;
}

}  // namespace weft::ops
