#include <gumbo.h>

#include <algorithm>

#include "text/html.h"
#include "text/utf8.h"

namespace weft {
namespace {

void collect(const GumboNode* node, std::string& out) {
  if (node->type == GUMBO_NODE_TEXT || node->type == GUMBO_NODE_WHITESPACE)
    out += node->v.text.text;
  if (node->type != GUMBO_NODE_ELEMENT) return;
  for (unsigned i = 0; i < node->v.element.children.length; ++i)
    collect(static_cast<const GumboNode*>(node->v.element.children.data[i]), out);
}

// The text that an HTML parser reads `markup` (no tags in it) as. A letter before it keeps white space from being dropped.
std::string parsed(const std::string& markup) {
  const std::string page = "x" + markup;
  GumboOutput* output = gumbo_parse_with_options(&kGumboDefaultOptions, page.data(), page.size());
  std::string text;
  collect(output->root, text);
  gumbo_destroy_output(&kGumboDefaultOptions, output);
  return text.substr(1);
}

bool is_letter(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'); }
bool is_digit(char c) { return c >= '0' && c <= '9'; }

// The number of a numeric reference, as HTML 5 reads it: 0x80 to 0x9f mean Windows-1252.
std::string numbered(std::uint64_t n) {
  static const char32_t windows[32] = {
      0x20ac, 0x81,   0x201a, 0x0192, 0x201e, 0x2026, 0x2020, 0x2021, 0x02c6, 0x2030, 0x0160,
      0x2039, 0x0152, 0x8d,   0x017d, 0x8f,   0x90,   0x2018, 0x2019, 0x201c, 0x201d, 0x2022,
      0x2013, 0x2014, 0x02dc, 0x2122, 0x0161, 0x203a, 0x0153, 0x9d,   0x017e, 0x0178};
  auto c = static_cast<char32_t>(std::min<std::uint64_t>(n, 0x110000));
  if (c >= 0x80 && c < 0xa0) return to_utf8({&windows[c - 0x80], 1});
  if (c == 0 || (c >= 0xd800 && c <= 0xdfff) || c > 0x10ffff) c = 0xfffd;
  const bool control = (c < 0x20 && c != 9 && c != 10 && c != 12 && c != 13) || c == 0x7f;
  if (control || (c >= 0xfdd0 && c <= 0xfdef) || (c & 0xfffe) == 0xfffe) return "";
  return to_utf8({&c, 1});
}

}  // namespace

std::string named_character(const std::string& name) {
  const std::string text = parsed("&" + name + ";");
  // A name that is not known, or known only in part, leaves the semicolon behind.
  return name != "semi" && text.ends_with(';') ? "" : text;
}

std::string html_unescape(const std::string& text) {
  std::string out;
  std::size_t done = 0;
  while (true) {
    const std::size_t at = text.find('&', done);
    out.append(text, done, at - done);
    if (at == std::string::npos) return out;
    std::size_t end = at + 1;
    const auto upto = [&](auto&& accepted) {
      while (end < text.size() && accepted(text[end])) ++end;
    };
    if (end < text.size() && text[end] == '#') {
      ++end;
      const bool hex = end < text.size() && (text[end] == 'x' || text[end] == 'X');
      if (hex) ++end;
      const std::size_t first = end;
      upto([&](char c) {
        return is_digit(c) || (hex && ((c >= 'a' && c <= 'f') || (c >= 'A' && c <= 'F')));
      });
      if (end > first) {
        std::uint64_t n = 0;
        for (std::size_t i = first; i < end && n < 0x110000; ++i)
          n = n * (hex ? 16 : 10) + static_cast<std::uint64_t>(is_digit(text[i])
                                                                   ? text[i] - '0'
                                                                   : (text[i] | 32) - 'a' + 10);
        if (end < text.size() && text[end] == ';') ++end;
        out += numbered(n);
        done = end;
        continue;
      }
    } else if (end < text.size() && is_letter(text[end])) {
      upto([](char c) { return is_letter(c) || is_digit(c); });
      if (end < text.size() && text[end] == ';') ++end;
      out += parsed(text.substr(at, end - at));
      done = end;
      continue;
    }
    out += '&';
    done = at + 1;
  }
}

}  // namespace weft
