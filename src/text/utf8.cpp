#include "text/utf8.h"
#include "text/cleaning.h"

#define PCRE2_CODE_UNIT_WIDTH 8

#include <pcre2.h>
#include <unicode/normalizer2.h>
#include <unicode/uchar.h>
#include <unicode/utf8.h>

#include <algorithm>
#include <map>
#include <optional>

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
               static_cast<unsigned char>(text[at]));
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

namespace {

// UTF-8 that was read as Latin-1 or Windows-1252: the part of ftfy.fix_text that needs judgement

// What Windows-1252 has at 0x80 to 0x9f; the five places that it leaves empty stay C1 controls.
constexpr char32_t upper_half[32] = {
    0x20ac, 0x81,   0x201a, 0x0192, 0x201e, 0x2026, 0x2020, 0x2021, 0x02c6, 0x2030, 0x0160,
    0x2039, 0x0152, 0x8d,   0x017d, 0x8f,   0x90,   0x2018, 0x2019, 0x201c, 0x201d, 0x2022,
    0x2013, 0x2014, 0x02dc, 0x2122, 0x0161, 0x203a, 0x0153, 0x9d,   0x017e, 0x0178};

std::optional<unsigned char> byte_in_latin1(char32_t c) {
  if (c < 0x100) return static_cast<unsigned char>(c);
  return {};
}
std::optional<unsigned char> byte_in_windows_1252(char32_t c) {
  const auto* at = std::find(std::begin(upper_half), std::end(upper_half), c);
  if (at != std::end(upper_half))
    return static_cast<unsigned char>(0x80 + (at - std::begin(upper_half)));
  if (c < 0x80 || (c >= 0xa0 && c < 0x100)) return static_cast<unsigned char>(c);
  return {};
}

// Kinds of characters whose neighbours tell real text from misread bytes.
enum Kind : unsigned {
  other = 0,
  strange = 1,   // signs that hardly anybody writes: broken bar, diaeresis by itself, dagger ...
  law = 2,       // pilcrow, section
  currency = 4,  // cent, pound, yen, euro
  opening = 8,   // marks before words: inverted ! and ?, opening quotes, copyright, bullet
  closing = 16,  // marks behind words: closing quotes, registered, trade mark
  number = 32,   // superscripts, fractions, mathematical signs
  small = 64,    // letters with accents
  capital = 128,
  small_elsewhere = 256,  // letters of Greek and Cyrillic
  capital_elsewhere = 512,
};

unsigned kind(char32_t c) {
  const auto in = [c](std::u32string_view set) { return set.find(c) != set.npos; };
  if (c < 0xa0) return other;
  if (in(U"¦¤¨¬¯¸ªºƒˆˇ˘˛˜†‡‰⌐◊�")) return strange;
  if (in(U"¶§")) return law;
  if (in(U"¢£¥€₧")) return currency;
  if (in(U"¡«¿©‘‚“„•‹΄΅")) return opening;
  if (in(U"®»˝”›™")) return closing;
  if (in(U"²³¹±¼½¾×µ÷⁄∂∆∏∑√∞∩∫≈≠≡≤≥№")) return number;
  if ((c >= 0xc0 && c <= 0xd1) || in(U"ØÜÝŒŠŸŽĂĀĄĆČĎĐĘĚĒĖĞĢİĪĶĹĽŁĻŃŇŅŘŚŞŢŤŮŰŹŻҐ")) return capital;
  if ((c >= 0xdf && c <= 0xf1) || in(U"üœšžăąāćčďđęěēėğģįīķĺľłļŕśşťźżґﬁﬂ")) return small;
  if ((c >= 0x3b1 && c <= 0x3c9) || (c >= 0x430 && c <= 0x45f) || in(U"άέήίΰ"))
    return small_elsewhere;
  if ((c >= 0x391 && c <= 0x3a9) || (c >= 0x401 && c <= 0x42f) || in(U"ÞΆΈΉΊΌΎΏΪΫ"))
    return capital_elsewhere;
  return other;
}

// As \w of a regular expression.
bool is_word(char32_t c) {
  const auto u = static_cast<UChar32>(c);
  return c == '_' || u_isalpha(u) || u_getNumericValue(u) != U_NO_NUMERIC_VALUE;
}

bool is_ascii_letter(char32_t c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'); }

// Whether characters are combined as in no language.
bool looks_wrong(std::u32string_view text) {
  constexpr unsigned any = law | currency | opening | closing | number | small | capital;
  const auto in = [](char32_t c, std::u32string_view set) { return set.find(c) != set.npos; };
  for (std::size_t i = 0; i < text.size(); ++i) {
    const char32_t c = text[i];
    if (c >= 0x80 && c < 0xa0) return true;
    if (i + 1 == text.size()) break;
    const char32_t second = text[i + 1];
    const unsigned a = kind(c), b = kind(text[i + 1]);
    if (((any | strange) & a && b == strange) || (a == strange && any & b)) return true;
    if ((small | small_elsewhere | closing | currency | number) & a && b == capital) return true;
    if ((closing | currency | number) & a && b == small) return true;
    if ((small | closing) & a && b == currency) return true;
    if (a == capital && ((number | law) & b || second == U'°')) return true;
    if ((currency | number) & a && b == opening) return true;
    if ((c == U'œ' || c == U'Œ') && !is_ascii_letter(second)) return true;
    // What Windows-1252 makes of the leads C2, C3, CE and D0, and more of the kind.
    if (in(c, U"ÂÃÎÐ") && (in(second, U"€œŠš¢£Ÿž\u00a0\u00ad®©°·»–—´") || (opening | closing) & b))
      return true;
    if (c == U'Ã' && second == U'¡') return true;
    if (c == U'×' && in(second, U"²³")) return true;
    if (c == U'à' && in(second, U"²µ¹¼½¾")) return true;
    // A lead whose tail, a no-break space, was turned into a space.
    if (in(c, U"ÂÃ") && second == ' ') {
      const auto before = [&](std::size_t k) { return i >= k ? text[i - k] : U'\0'; };
      const auto ends = [](char32_t l) { return l >= 'a' && l <= 'z'; };
      if (i == 0 || ends(before(1)) || (is_space(before(1)) && ends(before(2)))) return true;
    }
    if (i + 2 == text.size()) continue;
    const char32_t third = text[i + 2];
    const unsigned d = kind(third);
    if ((small | capital | currency | closing) & a && b == opening && d == number) return true;
    if ((small | capital | currency | number | law) & a && b == closing && d == opening)
      return true;
    if (((c >= 'a' && c <= 'z') || is_space(c)) && b == capital && d == currency) return true;
    if (c >= 'a' && c <= 'z' && b == capital && d == opening) return true;
    if ((small | capital) & a && (opening | closing) & b && is_word(third)) return true;
    if (is_ascii_letter(c) && (small_elsewhere | capital_elsewhere) & b && d == strange)
      return true;
    if (((c >= 'a' && c <= 'z') || in(c, U".,?!") || a == closing) && second == U'Â' &&
        (third == ' ' || (opening | closing) & d))
      return true;
    // Arabic: two such pairs.
    const auto pair = [&](std::size_t k) {
      return k + 1 < text.size() && in(text[k], U"ØÙ") &&
             (in(text[k + 1], U"\u00a0\u00ad·´–—―…’ŸŠ®°µ»") ||
              (currency | strange | number | opening) & kind(text[k + 1]));
    };
    if (pair(i) && pair(i + 2)) return true;
  }
  return false;
}

// The bytes as UTF-8, if they are.
std::optional<std::u32string> decoded(const std::string& bytes) {
  std::u32string out;
  const auto length = static_cast<std::int32_t>(bytes.size());
  for (std::int32_t i = 0; i < length;) {
    UChar32 c;
    U8_NEXT(bytes.data(), i, length, c);
    if (c < 0) return {};
    out.push_back(static_cast<char32_t>(c));
  }
  return out;
}

bool is_tail(unsigned char c) { return c >= 0x80 && c < 0xc0; }

// Restores byte A0 where the no-break space inside a character was replaced by a space.
std::string with_a0(std::string bytes) {
  const auto at = [&](std::size_t i) {
    return i < bytes.size() ? static_cast<unsigned char>(bytes[i]) : 0;
  };
  const auto tail = [&](std::size_t i) { return is_tail(at(i)); };
  const auto plain = [&](std::size_t i) { return tail(i) && at(i) != 0x85 && at(i) != 0xa0; };
  for (std::size_t i = 0; i + 1 < bytes.size(); ++i) {
    const unsigned char lead = at(i);
    if (lead == 0xc3 && at(i + 1) == ' ') {
      // "à" as a word by itself keeps the space behind it, but in Portuguese it begins some words.
      const std::string_view rest = std::string_view(bytes).substr(i + 2);
      const bool joined = rest.starts_with(' ') || rest.starts_with("quele") ||
                          rest.starts_with("quela") || rest.starts_with("quilo") ||
                          rest.starts_with("s ");
      if (!joined) {
        bytes.insert(i + 1, 1, '\xa0');
        continue;
      }
    }
    const bool two = lead == 0xc2 || lead == 0xc3 || lead == 0xc5 || lead == 0xce || lead == 0xd0 ||
                     lead == 0xd9;
    if (two && at(i + 1) == ' ')
      bytes[i + 1] = '\xa0';
    else if ((lead == 0xe2 || lead == 0xe3) && at(i + 1) == ' ' && plain(i + 2))
      bytes[i + 1] = '\xa0';
    else if (lead >= 0xe0 && lead <= 0xe3 && plain(i + 1) && at(i + 2) == ' ')
      bytes[i + 2] = '\xa0';
    else if (lead == 0xf0 && (at(i + 1) == ' ') + (at(i + 2) == ' ') + (at(i + 3) == ' ') == 1 &&
             tail(i + 1) + tail(i + 2) + tail(i + 3) == 2)
      for (std::size_t k = 1; k < 4; ++k)
        if (at(i + k) == ' ') bytes[i + k] = '\xa0';
  }
  return bytes;
}

// What the leads of UTF-8 sequences, of 2, 3 and 4 bytes, and their tails become when read as
// Latin-1, Windows-1250 to 1257 or Latin-2. Only the first and Windows-1252 are repaired here, but
// where a sequence begins and ends is seen by all.
constexpr std::u32string_view
    leads_of_2 =
        U"ĂÂÄĀÅÃÆĆČÇĎĐÉĚÊËĖÈĒĘÐĞĢÍÎÏİÌĪĶĹĻŁŃŇŅÑÓÔÖŐÒŌØÕŘŚŠŞŢÞÚÛÜŰÙŪŲŮÝŹŽŻß×ΒΓΔΕΖΗΘΙΚΛΜΝΞΟΠΡΣΤΥΦΧΨΩΪ"
        U"Ϋάέήί"
        U"ВГДЕЖЗИЙКЛМНОПРСТУФХЦЧШЩЪЫЬЭЮЯ",
    leads_of_3 = U"áăâäàāąåãæćčçďéěêëėèēęģíîïìīįķĺļŕźΰαβγδεζηθικλμνξοабвгдежзийклмноп",
    leads_of_4 = U"đðğóšπσру", tails_between_words = U"–—―‘’‚“”„•…",
    more_tails = U"ĄÆĽŁØŖŚŠŞŤŸŹŽŻŒąæƒľłøŗśšşťźžżœˆˇ˘˛˜˝΄΅ΆΈΉΊΌΎΏёђѓєѕіїјљњћќўџҐґ†‡‰‹›€№™";

bool may_be_tail(char32_t c) {
  return (c >= 0x80 && c < 0xc0) || (c >= 0x401 && c <= 0x40f && c != 0x40d) ||
         more_tails.find(c) != more_tails.npos;
}

// The number of characters from `i` on that look like one UTF-8 sequence; 0 if they do not.
std::size_t sequence(std::u32string_view text, std::size_t i) {
  if (i >= text.size()) return 0;
  const auto in = [&](std::u32string_view set) { return set.find(text[i]) != set.npos; };
  const std::size_t tails = in(leads_of_2) ? 1 : in(leads_of_3) ? 2 : in(leads_of_4) ? 3 : 0;
  for (std::size_t k = 1; k <= tails; ++k) {
    const char32_t c = i + k < text.size() ? text[i + k] : U'\0';
    if (!may_be_tail(c) && c != ' ' && tails_between_words.find(c) == tails_between_words.npos)
      return 0;
  }
  return tails > 0 ? tails + 1 : 0;
}

// The character that Windows-1252 has at a C1 control, or c.
char32_t windows_1252(char32_t c) { return c >= 0x80 && c < 0xa0 ? upper_half[c - 0x80] : c; }

// The text with such sequences decoded, once; itself where nothing looks wrong.
std::u32string repair_encoding(const std::u32string& text) {
  if (!looks_wrong(text)) return text;
  for (const auto encode : {byte_in_latin1, byte_in_windows_1252}) {
    std::string bytes;
    for (const char32_t c : text)
      if (const auto b = encode(c)) bytes += static_cast<char>(*b);
    if (bytes.size() != text.size()) continue;
    if (const auto fixed = decoded(with_a0(bytes))) return *fixed;
  }
  // The whole text does not decode: try single sequences in it.
  std::u32string out;
  for (std::size_t i = 0; i < text.size();) {
    std::size_t end = i;
    if (i == 0 || !may_be_tail(text[i - 1]))
      while (const std::size_t n = sequence(text, end)) end += n;
    std::u32string part = text.substr(i, std::max<std::size_t>(end - i, 1));
    if (end > i && part.size() < text.size() && looks_wrong(part))
      for (std::u32string next; (next = repair_encoding(part)) != part;) part = next;
    out += part;
    i += std::max<std::size_t>(end - i, 1);
  }
  // C1 controls were meant as Windows-1252; the result is examined again.
  if (out == text) std::ranges::transform(out, out.begin(), windows_1252);
  return out;
}

// ---- The forms of characters ----

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

// Ligatures and digraphs of Latin letters encoded as one character for printing or for old
// encodings.
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
  // Repair line by line: one broken line says nothing about the next.
  bool references = true;
  for (std::size_t begin = 0; begin < text.size();) {
    const std::size_t end = std::min(text.find('\n', begin), text.size() - 1) + 1;
    std::string line = text.substr(begin, end - begin);
    // In a text with tags, references may be intended literally.
    if (line.find('<') != std::string::npos) references = false;
    for (std::string next; (next = fix_once(line, references)) != line;) line = next;
    out += line;
    begin = end;
  }
  return out;
}

}  // namespace weft
