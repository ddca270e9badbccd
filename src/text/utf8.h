// Texts are UTF-8 in std::string: checked, repaired, searched. What must look at characters looks
// at code points, or searches with regular expressions that mean what they mean in Python's re:
// PCRE2, and classes written out where the two differ.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <string_view>

namespace weft {

// Exit::data unless `text` is UTF-8: names `what` (such as "prompts.txt, line 3") and the first
// byte that is not.
void check_utf8(std::string_view text, const std::string& what);

// XXH3-128 of a list of texts, in their order, and of where each one ends. What is made of texts
// keeps it, and whoever reads that compares.
std::string hash_of_texts(std::span<const std::string> texts);

// Bytes that are not UTF-8 become U+FFFD.
std::u32string to_code_points(std::string_view text);
std::string to_utf8(std::u32string_view text);

// White space as Python's str.isspace has it: what strip() takes and \s matches in the original.
bool is_space(char32_t c);
std::string strip(const std::string& text);

// ftfy.fix_text of version 6.3.1. In ftfy's order, repeated until nothing changes:
//   HTML references that end in a semicolon, in texts without tags;
//   UTF-8 that was read in another encoding (Latin-1 and 2, Windows-1250 to 1254 and 1257, Mac
//     Roman, code page 437) is decoded, the whole text or the sequences in it, where it looks wrong
//     (a letter with an accent beside a sign, C1 controls ...), a lost no-break space inside such a
//     sequence restored and lost bytes as U+FFFD;
//   C1 controls as Windows-1252; ligatures of Latin letters taken apart; full- and half-width forms
//     to usual ones;
//   curly quotes straight; line breaks \n; terminal escapes and control characters removed; NFC.
std::string fix_text(const std::string& text);

class Pattern {
 public:
  // `expression` in Python's notation over UTF-8; \w \d \s \b and their opposites mean what they
  // mean for str in Python (inside of [ ] only \w, \d and \s).
  explicit Pattern(std::string_view expression);

  // Every match replaced; $1 in `replacement` is the first group.
  std::string replace(const std::string& text, const std::string& replacement) const;
  std::size_t count(const std::string& text) const;
  // The end of a match that begins at byte `at`, or npos. Looking behind sees the text before `at`.
  std::size_t match(std::string_view text, std::size_t at) const;

 private:
  struct Code;
  std::shared_ptr<Code> code_;
};

}  // namespace weft
