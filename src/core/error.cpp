#include "core/error.h"

namespace weft {

void throw_error(Exit code, std::string_view hint, const char* file, int line,
                 fmt::string_view format, fmt::format_args values) {
  throw Error(code, fmt::vformat(format, values), std::string(hint), file, line);
}

void throw_broken(const char* invariant, const char* file, int line) {
  throw Error(Exit::internal, std::string("internal error: ") + invariant,
              "this is a bug in weft, please report it with the log", file, line);
}

}  // namespace weft
