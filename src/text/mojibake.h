// UTF-8 that somebody has read as Latin-1 or Windows-1252: the part of ftfy.fix_text that needs judgement.
#pragma once

#include <string>

namespace weft {

// The text with such sequences decoded, once; itself where nothing looks wrong.
std::u32string repair_encoding(const std::u32string& text);

// The character that Windows-1252 has at a C1 control, or c.
char32_t windows_1252(char32_t c);

}  // namespace weft
