#include "text/utf8.h"

#define PCRE2_CODE_UNIT_WIDTH 8

#include <pcre2.h>
#include <unicode/utf8.h>

#include <map>

#include "core/error.h"
#include "core/hash.h"

namespace weft {

void check_utf8(std::string_view text, const std::string& what) {
  const auto length = static_cast<std::int32_t>(text.size());
  for (std::int32_t i = 0; i < length;) {
    const std::int32_t at = i;
    UChar32 c;
    U8_NEXT(text.data(), i, length, c);
    WEFT_CHECK(c >= 0, Exit::data, "save the text as UTF-8 (iconv -t UTF-8)",
               "{} is not UTF-8: byte {} is 0x{:02x}", what, at + 1,
               static_cast<unsigned char>(text[at]));
  }
}

std::string hash_of_texts(std::span<const std::string> texts) {
  Hasher hasher;
  for (const std::string& text : texts) {
    const std::uint64_t length = text.size();
    // The length first, so that two lists with the same bytes in sum differ.
    hasher.add(std::as_bytes(std::span(&length, 1)));
    hasher.add(std::as_bytes(std::span(text)));
  }
  return to_hex(hasher.value());
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

namespace {

const std::string space =
    R"(\x09-\x0d\x1c-\x20\x{85}\x{a0}\x{1680}\x{2000}-\x{200a}\x{2028}\x{2029}\x{202f}\x{205f}\x{3000})";
const std::string word = R"(\p{L}\p{N}_)";
const std::string digit = R"(\p{Nd})";

// Uses Python's character classes instead of PCRE2's, which differ in places and between versions.
std::string written_out(std::string_view expression) {
  const std::string w = "[" + word + "]";
  const std::map<char, std::string> outside = {
      {'w', w},
      {'W', "[^" + word + "]"},
      {'d', digit},
      {'D', R"(\P{Nd})"},
      {'s', "[" + space + "]"},
      {'S', "[^" + space + "]"},
      {'b', "(?:(?<=" + w + ")(?!" + w + ")|(?<!" + w + ")(?=" + w + "))"}};
  const std::map<char, std::string> inside = {{'w', word}, {'d', digit}, {'s', space}};
  std::string out;
  bool in_class = false;
  for (std::size_t i = 0; i < expression.size(); ++i) {
    const char c = expression[i];
    if (c == '[' && !in_class) {
      in_class = true;
    } else if (c == ']') {
      in_class = false;
    } else if (c == '\\' && i + 1 < expression.size()) {
      const auto& known = in_class ? inside : outside;
      const auto found = known.find(expression[++i]);
      out += found != known.end() ? found->second : std::string{'\\', expression[i]};
      continue;
    }
    out += c;
  }
  return out;
}

PCRE2_SPTR bytes_of(std::string_view s) { return reinterpret_cast<PCRE2_SPTR>(s.data()); }

}  // namespace

struct Pattern::Code {
  pcre2_code* code = nullptr;
  pcre2_match_data* found = nullptr;
  ~Code() {
    pcre2_match_data_free(found);
    pcre2_code_free(code);
  }
  // Whether there is a match at or after `at`; its position is then in `found`.
  bool search(std::string_view text, std::size_t at, std::uint32_t options) const {
    const int n = pcre2_match(code, bytes_of(text), text.size(), at, options | PCRE2_NO_UTF_CHECK,
                              found, nullptr);
    WEFT_CHECK(n > 0 || n == PCRE2_ERROR_NOMATCH, Exit::data,
               "shorten the text, or set t5.clean = false",
               "a text of {} bytes is too much for the expressions that clean it (PCRE2 error {})",
               text.size(), n);
    return n > 0;
  }
};

Pattern::Pattern(std::string_view expression) : code_(std::make_shared<Code>()) {
  const std::string full = written_out(expression);
  int error = 0;
  std::size_t at = 0;
  code_->code =
      pcre2_compile(bytes_of(full), full.size(), PCRE2_UTF | PCRE2_UCP, &error, &at, nullptr);
  WEFT_ASSERT(code_->code != nullptr);
  pcre2_jit_compile(code_->code,
                    PCRE2_JIT_COMPLETE);  // without a JIT, the interpreter is used
  code_->found = pcre2_match_data_create_from_pattern(code_->code, nullptr);
}

std::string Pattern::replace(const std::string& text, const std::string& replacement) const {
  std::string out;
  std::size_t done = 0;
  while (code_->search(text, done, 0)) {
    const std::size_t* at = pcre2_get_ovector_pointer(code_->found);
    WEFT_ASSERT(at[1] > at[0]);  // none of our expressions matches an empty text
    out.append(text, done, at[0] - done);
    for (std::size_t i = 0; i < replacement.size(); ++i)
      if (replacement.compare(i, 2, "$1") == 0)
        out.append(text, at[2], at[3] - at[2]), ++i;
      else
        out += replacement[i];
    done = at[1];
  }
  return out.append(text, done);
}

std::size_t Pattern::count(const std::string& text) const {
  std::size_t n = 0;
  for (std::size_t at = 0; code_->search(text, at, 0); ++n)
    at = pcre2_get_ovector_pointer(code_->found)[1];
  return n;
}

std::size_t Pattern::match(std::string_view text, std::size_t at) const {
  if (!code_->search(text, at, PCRE2_ANCHORED)) return std::string::npos;
  return pcre2_get_ovector_pointer(code_->found)[1];
}

}  // namespace weft
