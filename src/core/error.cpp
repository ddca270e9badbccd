#include "core/error.h"

namespace weft {

void throw_error(Exit code, std::string_view hint, const char* file, int line,
                 fmt::string_view format, fmt::format_args values) {
  std::string what = fmt::vformat(format, values);
  // what() would end at a zero byte.
  for (std::size_t at = 0; (at = what.find('\0', at)) != what.npos;) what.replace(at, 1, "\\x00");
  throw Error(code, std::move(what), std::string(hint), file, line);
}

void throw_broken(const char* invariant, const char* file, int line) {
  throw Error(Exit::internal, std::string("internal error: ") + invariant,
              "this is a bug in weft, please report it with the log", file, line);
}

}  // namespace weft
