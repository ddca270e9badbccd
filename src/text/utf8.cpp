#include "text/utf8.h"

#include <unicode/utf8.h>

#include "core/error.h"

namespace weft {

void check_utf8(std::string_view text, const std::string& what) {
  const auto length = static_cast<std::int32_t>(text.size());
  for (std::int32_t i = 0; i < length;) {
    const std::int32_t at = i;
    UChar32 c;
    U8_NEXT(text.data(), i, length, c);
    WEFT_CHECK(c >= 0, Exit::data, "save the text as UTF-8 (iconv -t UTF-8)",
               "{} is not UTF-8: byte {} is 0x{:02x}", what, at + 1,
               static_cast<unsigned char>(text[static_cast<std::size_t>(at)]));
  }
}

std::u32string to_code_points(std::string_view text) {
  std::u32string out;
  out.reserve(text.size());
  const auto length = static_cast<std::int32_t>(text.size());
  for (std::int32_t i = 0; i < length;) {
    UChar32 c;
    U8_NEXT_OR_FFFD(text.data(), i, length, c);
    out.push_back(static_cast<char32_t>(c));
  }
  return out;
}

std::string to_utf8(std::u32string_view text) {
  std::string out;
  out.reserve(text.size());
  for (const char32_t c : text) {
    char bytes[4];
    std::int32_t n = 0;
    U8_APPEND_UNSAFE(bytes, n, static_cast<UChar32>(c));
    out.append(bytes, static_cast<std::size_t>(n));
  }
  return out;
}

bool is_space(char32_t c) {
  return (c >= 0x09 && c <= 0x0d) || (c >= 0x1c && c <= 0x20) || c == 0x85 || c == 0xa0 ||
         c == 0x1680 || (c >= 0x2000 && c <= 0x200a) || c == 0x2028 || c == 0x2029 || c == 0x202f ||
         c == 0x205f || c == 0x3000;
}

std::string strip(const std::string& text) {
  const std::u32string points = to_code_points(text);
  std::size_t begin = 0, end = points.size();
  while (begin < end && is_space(points[begin])) ++begin;
  while (end > begin && is_space(points[end - 1])) --end;
  return to_utf8(std::u32string_view(points).substr(begin, end - begin));
}

}  // namespace weft
