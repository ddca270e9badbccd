// "key=value,..." behind the name of data that is made in memory ("shapes:", "text:").
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace weft {

struct NumberRange {
  std::int64_t low = 0, high = 0;
};
struct NumberKey {
  const char* name;
  NumberRange* target;
  std::int64_t least, most;
  bool range;  // LOW..HIGH is allowed as well as one number
};
struct TextKey {
  const char* name;
  std::string* target;
};

// Sets the targets of the keys in `spec`; blanks around an item and line ends do not count, and
// text holds no comma. `kind` is "shapes" or "text", for messages; `hint` is an example. Returns
// the values of `numbers`, however `spec` is written. Throws Exit::usage for an unknown key, naming
// the nearest, and for a value out of range.
std::string read_keys(std::string_view spec, std::string_view kind, const std::string& hint,
                      std::span<const NumberKey> numbers, std::span<const TextKey> texts = {});

}  // namespace weft
