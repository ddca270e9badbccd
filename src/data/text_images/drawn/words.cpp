#include "data/text_images/drawn/words.h"

#include <array>
#include <string_view>

namespace weft {
namespace {

constexpr std::u32string_view vowels = U"aaeeeiioou";
constexpr auto onsets = std::to_array<std::u32string_view>(
    {U"b",  U"c",  U"d",  U"f",  U"g",  U"h",  U"k",  U"l",  U"m",  U"n",
     U"p",  U"r",  U"s",  U"t",  U"v",  U"w",  U"y",  U"z",  U"j",  U"q",
     U"st", U"tr", U"ch", U"sh", U"pl", U"gr", U"th", U"br", U"cl", U"sp"});
constexpr auto codas =
    std::to_array<std::u32string_view>({U"", U"", U"", U"n", U"r", U"s", U"t", U"l", U"d", U"m",
                                        U"x", U"ck", U"ng", U"st", U"ll", U"nt", U"ty", U"p"});
constexpr std::u32string_view digits = U"0123456789";
constexpr std::u32string_view signs = U"&@#!?*+=/()[]%$€£";

template <class T>
const auto& pick(Draws& d, const T& from) {
  return from[static_cast<std::size_t>(d.below(static_cast<int>(from.size())))];
}

char32_t upper(char32_t c) { return c >= U'a' && c <= U'z' ? c - 32 : c; }

std::u32string syllables(Draws& d) {
  std::u32string word;
  for (int n = 1 + d.below(3) + d.below(2); n > 0; --n) {
    if (d.chance(0.85)) word += pick(d, onsets);
    word += pick(d, vowels);
    word += pick(d, codas);
  }
  return word;
}

std::u32string number(Draws& d, int most) {
  std::u32string word;
  for (int n = 1 + d.below(most); n > 0; --n) word += pick(d, digits);
  return word;
}

std::u32string figures(Draws& d) {
  switch (d.below(6)) {
    case 0:
      return pick(d, std::u32string_view(U"$€£")) + number(d, 3) + U"." + pick(d, digits) +
             pick(d, digits);
    case 1:
      return number(d, 2) + U":" + pick(d, digits) + pick(d, digits);
    case 2:
      return number(d, 2) + U"%";
    case 3:
      return number(d, 4) + U"-" + number(d, 4);
    default:
      return number(d, 6);
  }
}

std::u32string letters(Draws& d, char32_t first, char32_t last) {
  std::u32string word;
  for (int n = 2 + d.below(8); n > 0; --n)
    word += static_cast<char32_t>(
        first + static_cast<char32_t>(d.below(static_cast<int>(last - first + 1))));
  return word;
}

}  // namespace

std::u32string draw_word(Draws& d, Script script) {
  const bool loud = d.chance(0.4);
  if (script == Script::cyrillic) return loud ? letters(d, 0x410, 0x42f) : letters(d, 0x430, 0x44f);
  if (script == Script::greek) return loud ? letters(d, 0x391, 0x3a1) : letters(d, 0x3b1, 0x3c9);
  if (d.chance(0.15)) return figures(d);
  std::u32string word = d.chance(0.85) ? syllables(d) : letters(d, U'a', U'z');
  if (loud)
    for (char32_t& c : word) c = upper(c);
  else if (d.chance(0.5))
    word[0] = upper(word[0]);
  if (d.chance(0.06)) word += pick(d, signs);
  if (d.chance(0.06)) word += pick(d, std::u32string_view(U".,:;!'\""));
  if (d.chance(0.05)) word += pick(d, digits);
  return word;
}

}  // namespace weft
