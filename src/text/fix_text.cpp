#include "text/fix_text.h"

#include <unicode/normalizer2.h>

#include <map>

#include "core/error.h"
#include "text/html.h"
#include "text/mojibake.h"
#include "text/pattern.h"
#include "text/utf8.h"

namespace weft {
namespace {

std::string normalised(const std::string& text, const icu::Normalizer2* form) {
  UErrorCode status = U_ZERO_ERROR;
  std::string out;
  form->normalize(icu::UnicodeString::fromUTF8(text), status).toUTF8String(out);
  WEFT_ASSERT(U_SUCCESS(status));
  return out;
}

const icu::Normalizer2* form(const icu::Normalizer2* (*get)(UErrorCode&)) {
  UErrorCode status = U_ZERO_ERROR;
  const icu::Normalizer2* made = get(status);
  WEFT_ASSERT(U_SUCCESS(status));
  return made;
}

// Ligatures and digraphs of Latin letters that are one character for the sake of printing or of old encodings.
const std::map<char32_t, std::u32string> ligatures = {
    {U'Ĳ', U"IJ"},  {U'ĳ', U"ij"},  {U'ŉ', U"ʼn"}, {U'Ǳ', U"DZ"}, {U'ǲ', U"Dz"}, {U'ǳ', U"dz"},
    {U'Ǆ', U"DŽ"},  {U'ǅ', U"Dž"},  {U'ǆ', U"dž"}, {U'Ǉ', U"LJ"}, {U'ǈ', U"Lj"}, {U'ǉ', U"lj"},
    {U'Ǌ', U"NJ"},  {U'ǋ', U"Nj"},  {U'ǌ', U"nj"}, {U'ﬀ', U"ff"}, {U'ﬁ', U"fi"}, {U'ﬂ', U"fl"},
    {U'ﬃ', U"ffi"}, {U'ﬄ', U"ffl"}, {U'ﬅ', U"ſt"}, {U'ﬆ', U"st"}};

bool is_control(char32_t c) {
  return c < 0x09 || c == 0x0b || (c >= 0x0e && c < 0x20) || c == 0x7f ||
         (c >= 0x206a && c <= 0x206f) || c == 0xfeff || (c >= 0xfff9 && c <= 0xfffc);
}

// One character as it is to be written.
std::u32string written(char32_t c) {
  c = windows_1252(c);
  if (const auto found = ligatures.find(c); found != ligatures.end()) return found->second;
  if (c == 0x3000) return U" ";
  if (c > 0xff00 && c < 0xfff0)
    return to_code_points(normalised(to_utf8({&c, 1}), form(&icu::Normalizer2::getNFKCInstance)));
  if (c >= 0x201c && c <= 0x201f) return U"\"";
  if (c == 0x02bc || (c >= 0x2018 && c <= 0x201b)) return U"'";
  if (c == '\r' || c == 0x2028 || c == 0x2029) return U"\n";
  return {c};
}

std::string fix_once(const std::string& text, bool references) {
  static const Pattern reference("&#?[0-9A-Za-z]{1,24};");
  static const Pattern escape(R"(\x1b\[[0-9;]*[a-zA-Z])");
  std::string unescaped;
  for (std::size_t i = 0; i < text.size();) {
    const std::size_t end =
        references && text[i] == '&' ? reference.match(text, i) : std::string::npos;
    if (end == std::string::npos) {
      unescaped += text[i++];
      continue;
    }
    const std::string name = text.substr(i + 1, end - i - 2);
    const std::string known =
        name[0] == '#' ? html_unescape(text.substr(i, end - i)) : named_character(name);
    unescaped += known.empty() && name[0] != '#' ? text.substr(i, end - i) : known;
    i = end;
  }
  std::u32string points = to_code_points(unescaped);
  for (std::u32string next; (next = repair_encoding(points)) != points;) points = next;
  std::u32string out;
  for (std::size_t i = 0; i < points.size(); ++i)
    if (!(points[i] == '\r' && i + 1 < points.size() && points[i + 1] == '\n'))
      out += written(points[i]);
  std::string plain;
  for (const char32_t c : to_code_points(escape.replace(to_utf8(out), "")))
    if (!is_control(c)) plain += to_utf8({&c, 1});
  return normalised(plain, form(&icu::Normalizer2::getNFCInstance));
}

}  // namespace

std::string fix_text(const std::string& text) {
  std::string out;
  // Line by line: one broken line says nothing about the next.
  bool references = true;
  for (std::size_t begin = 0; begin < text.size();) {
    const std::size_t end = std::min(text.find('\n', begin), text.size() - 1) + 1;
    std::string line = text.substr(begin, end - begin);
    // Where there are tags, references may be meant as they stand.
    if (line.find('<') != std::string::npos) references = false;
    for (std::string next; (next = fix_once(line, references)) != line;) line = next;
    out += line;
    begin = end;
  }
  return out;
}

}  // namespace weft
