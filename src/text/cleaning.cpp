#include "text/cleaning.h"

#include <unicode/locid.h>
#include <unicode/unistr.h>

#include <string_view>
#include <vector>

#include "text/utf8.h"

namespace weft {
namespace {

struct Step {
  Pattern find;
  std::string put;
};
using Steps = std::vector<Step>;

std::string run(const Steps& steps, std::string text) {
  for (const Step& s : steps) text = s.find.replace(text, s.put);
  return text;
}

// '+' is a space and %XX a byte, as in the query of a URL; bytes that are then no UTF-8 become
// U+FFFD.
std::string unquote(const std::string& text) {
  const auto value = [](char c) {
    if (c >= '0' && c <= '9') return c - '0';
    c = static_cast<char>(c | 32);
    return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
  };
  std::string bytes;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const bool quoted =
        text[i] == '%' && i + 2 < text.size() && value(text[i + 1]) >= 0 && value(text[i + 2]) >= 0;
    if (quoted) {
      bytes += static_cast<char>(value(text[i + 1]) * 16 + value(text[i + 2]));
      i += 2;
    } else {
      bytes += text[i] == '+' ? ' ' : text[i];
    }
  }
  return to_utf8(to_code_points(bytes));
}

std::string lower(const std::string& text) {
  std::string out;
  icu::UnicodeString::fromUTF8(text).toLower(icu::Locale::getRoot()).toUTF8String(out);
  return out;
}

// An address: either with its scheme, or by the end of its name.
Pattern address(const std::string& scheme) {
  return Pattern(
      R"(\b()" + scheme +
      R"(:(?:/{1,3}|[a-zA-Z0-9%])|[a-zA-Z0-9.\-]+[.](?:com|co|ru|net|org|edu|gov|it)[\w/\-]*\b/?(?!@)))");
}

const Steps& before_html() {
  static const Steps steps = {
      {Pattern("<person>"), "person"}, {address("https?"), ""}, {address("www"), ""}};
  return steps;
}

// Removes from the page's text the marks that no reader would speak.
const Steps& marks() {
  static const std::string ellipsis_and_signs = R"([#®•©™&@·º½¾¿¡§~)(\]\[}{|\\/*]+)";
  static const Steps steps = {
      {Pattern(R"(@\w+\b)"), ""},  // @name
      // Strokes, phonetic extensions, enclosed letters, compatibility forms, ideographs.
      {Pattern(R"([\x{31c0}-\x{31ff}\x{3200}-\x{4dbf}\x{4dc0}-\x{9fff}]+)"), ""},
      // Dashes of all kinds.
      {Pattern(
           R"([\x{2d}\x{58a}\x{5be}\x{1400}\x{1806}\x{2010}-\x{2015}\x{2e17}\x{2e1a}\x{2e3a}\x{2e3b}\x{2e40})"
           R"(\x{301c}\x{3030}\x{30a0}\x{fe31}\x{fe32}\x{fe58}\x{fe63}\x{ff0d}]+)"),
       "-"},
      {Pattern("[`´«»“”¨]"), "\""},
      {Pattern("[‘’]"), "'"},
      {Pattern("&quot;?"), ""},
      {Pattern("&amp"), ""},
      {Pattern(R"(\d{1,3}\.\d{1,3}\.\d{1,3}\.\d{1,3})"), " "},  // IP addresses
      {Pattern(R"(\d:\d\d\s+$)"), ""},
      {Pattern(R"(\\n)"), " "},
      {Pattern(R"(#\d{1,3}\b)"), ""},
      {Pattern(R"(#\d{5,}\b)"), ""},
      {Pattern(R"(\b\d{6,}\b)"), ""},
      {Pattern(R"(\S+\.(?:png|jpg|jpeg|bmp|webp|eps|pdf|apk|mp4))"), ""},
      {Pattern(R"(["']{2,})"), "\""},
      {Pattern(R"(\.{2,})"), " "},
      {Pattern(ellipsis_and_signs), " "},
      {Pattern(R"(\s+\.\s+)"), " "}};
  return steps;
}

// Removes what shops, stock photos and file names leave in captions; then tidies spaces and ends.
const Steps& rubbish() {
  static const Steps steps = {
      {Pattern(R"(\b[a-zA-Z]{1,3}\d{3,15}\b)"), ""},
      {Pattern(R"(\b[a-zA-Z]+\d+[a-zA-Z]+\b)"), ""},
      {Pattern(R"(\b\d+[a-zA-Z]+\d+\b)"), ""},
      {Pattern(R"((worldwide\s+)?(free\s+)?shipping)"), ""},
      {Pattern(R"((free\s)?download(\sfree)?)"), ""},
      {Pattern(R"(\bclick\b\s(?:for|on)\s\w+)"), ""},
      {Pattern(R"(\b(?:png|jpg|jpeg|bmp|webp|eps|pdf|apk|mp4)(\simage[s]?)?)"), ""},
      {Pattern(R"(\bpage\s+\d+\b)"), ""},
      {Pattern(R"(\b\d*[a-zA-Z]+\d+[a-zA-Z]+\d+[a-zA-Z\d]*\b)"), " "},
      {Pattern(R"(\b\d+\.?\d*[xх×]\d+\.?\d*\b)"), ""},  // sizes; the second x is Cyrillic
      {Pattern(R"(\b\s+:\s+)"), ": "},
      {Pattern(R"((\D[,./])\b)"), "$1 "},
      {Pattern(R"(\s+)"), " "},
      {Pattern(R"(^["']((?s:.)+)["']$)"), "$1"},
      {Pattern(R"(^['_,\-:;])"), ""},
      {Pattern(R"(['_,\-:+]$)"), ""},
      {Pattern(R"(^\.\S+$)"), ""}};
  return steps;
}

std::string clean_caption(const std::string& caption) {
  std::string text = run(before_html(), lower(strip(unquote(caption))));
  text = run(marks(), html_text(text));
  // this-is-a-name, this_is_another
  static const Pattern joint("[-_]");
  if (joint.count(text) > 3) text = joint.replace(text, " ");
  text = strip(html_unescape(html_unescape(fix_text(text))));
  return strip(run(rubbish(), text));
}

}  // namespace

std::string clean_text(const std::string& text) { return clean_caption(clean_caption(text)); }

}  // namespace weft
