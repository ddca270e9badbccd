#include "core/version.h"

#include <fmt/format.h>

#ifndef WEFT_COMMIT
#define WEFT_COMMIT "unknown"
#endif
#ifndef WEFT_VERSION
#define WEFT_VERSION "0"
#endif

namespace weft {

std::string version_line() {
  return fmt::format("weft {} (commit {}, g++ {})", WEFT_VERSION, WEFT_COMMIT, __VERSION__);
}

}  // namespace weft
