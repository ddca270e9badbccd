// Texts are UTF-8 in std::string; what must look at characters looks at code points.
#pragma once

#include <string>
#include <string_view>

namespace weft {

// Exit::data unless `text` is UTF-8: names `what` (such as "prompts.txt, line 3") and the first byte that is not.
void check_utf8(std::string_view text, const std::string& what);

// Bytes that are not UTF-8 become U+FFFD.
std::u32string to_code_points(std::string_view text);
std::string to_utf8(std::u32string_view text);

// White space as Python's str.isspace has it: what strip() takes and \s matches in the original.
bool is_space(char32_t c);
std::string strip(const std::string& text);

}  // namespace weft
