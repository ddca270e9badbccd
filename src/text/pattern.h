// Regular expressions with the meaning that they have in Python's re: PCRE2, and classes written out where the two differ.
#pragma once

#include <memory>
#include <string>
#include <string_view>

namespace weft {

class Pattern {
 public:
  // `expression` in Python's notation over UTF-8; \w \d \s \b and their opposites mean what they mean for str in Python
  // (inside of [ ] only \w, \d and \s).
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
