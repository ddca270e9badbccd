#include "core/printable.h"

#include <fmt/format.h>
#include <unicode/utf8.h>

#include <cstdint>

namespace weft {
namespace {

bool is_control(std::int32_t c) {
  return c < 0x20 || (c >= 0x7f && c <= 0x9f) || c == 0x2028 || c == 0x2029;
}

// Unicode's Bidi_Control: what a reader sees is not what stands there.
bool turns_text(std::int32_t c) {
  return c == 0x61c || c == 0x200e || c == 0x200f || (c >= 0x202a && c <= 0x202e) ||
         (c >= 0x2066 && c <= 0x2069);
}

std::string escaped(std::int32_t c) {
  switch (c) {
    case '\n':
      return "\\n";
    case '\r':
      return "\\r";
    case '\t':
      return "\\t";
    default:
      return c < 0x80 ? fmt::format("\\x{:02x}", c) : fmt::format("\\u{:04x}", c);
  }
}

// A place near `at` where no character is cut.
std::size_t boundary(std::string_view text, std::size_t at) {
  for (int i = 0; i < 3 && at < text.size() && U8_IS_TRAIL(text[at]); ++i) ++at;
  return at;
}

}  // namespace

std::string printable(std::string_view text, std::size_t longest, std::string_view kept) {
  if (text.size() > longest) {
    const std::size_t begin = boundary(text, longest - longest / 4);
    const std::size_t end = boundary(text, text.size() - longest / 4);
    return printable(text.substr(0, begin), begin, kept) + "..." +
           printable(text.substr(end), text.size(), kept);
  }
  std::string out;
  out.reserve(text.size());
  const auto length = static_cast<std::int32_t>(text.size());
  for (std::int32_t i = 0; i < length;) {
    const std::int32_t at = i;
    std::int32_t c = 0;
    U8_NEXT(text.data(), i, length, c);
    const std::string_view bytes =
        text.substr(static_cast<std::size_t>(at), static_cast<std::size_t>(i - at));
    if (c < 0)
      for (const char byte : bytes)
        out += fmt::format("\\x{:02x}", static_cast<unsigned char>(byte));
    else if ((is_control(c) || turns_text(c)) && kept.find(bytes) == kept.npos)
      out += escaped(c);
    else
      out += bytes;
  }
  return out;
}

}  // namespace weft
