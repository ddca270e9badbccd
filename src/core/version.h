// What this binary is.
#pragma once

#include <string>

namespace weft {

// "weft 0.1.0 (commit abc1234, g++ 12.2.0)": kept with every run and checkpoint.
std::string version_line();

}  // namespace weft
