// fix_text of text/utf8.h: what ftfy.fix_text (6.3.1) does, in its order.
#include <unicode/locid.h>
#include <unicode/normalizer2.h>
#include <unicode/uchar.h>
#include <unicode/unistr.h>
#include <unicode/utf8.h>

#include <algorithm>
#include <map>
#include <optional>
#include <string_view>

#include "core/error.h"
#include "text/cleaning.h"
#include "text/utf8.h"

namespace weft {
namespace {

// ---- UTF-8 that was read in another encoding: the part that needs judgement

// An encoding of one byte a character, ASCII below 0x80.
struct Encoding {
  std::u32string_view upper;  // the characters 0x80 to 0xff; empty: the code points themselves
  // As Windows decodes: places that the encoding leaves empty stay C1 controls, and byte 0x1a is
  // what was lost, U+FFFD.
  bool sloppy = false;
  bool restores_a0 = true;  // a space may have been byte 0xa0
};

constexpr std::u32string_view windows_1252_upper =
    U"€\u0081‚ƒ„…†‡ˆ‰Š‹Œ\u008dŽ\u008f\u0090‘’“”•–—˜™š›œ\u009džŸ\u00a0¡¢£¤¥¦§¨©ª«¬\u00ad®¯°±²³´µ¶·¸¹"
    U"º»"
    U"¼½¾¿ÀÁÂÃÄÅÆÇÈÉÊËÌÍÎÏÐÑÒÓÔÕÖ×ØÙÚÛÜÝÞßàáâãäåæçèéêëìíîïðñòóôõö÷øùúûüýþÿ";

// In the order in which they are tried.
constexpr Encoding encodings[] = {
    // Latin-1, Windows-1252, 1251, 1250, 1253, 1254, 1257, Latin-2, Mac Roman, code page 437
    {},
    {windows_1252_upper, true},
    {U"ЂЃ‚ѓ„…†‡€‰Љ‹ЊЌЋЏђ‘’“”•–—\u0098™љ›њќћџ\u00a0ЎўЈ¤Ґ¦§Ё©Є«¬\u00ad®Ї°±Ііґµ¶·ё№є»јЅѕїАБВГДЕЖЗИЙ"
     U"КЛМНОПРСТУФХЦЧШЩЪЫЬЭЮЯабвгдежзийклмнопрстуфхцчшщъыьэюя",
     true},
    {U"€\u0081‚\u0083„…†‡\u0088‰Š‹ŚŤŽŹ\u0090‘’“”•–—\u0098™š›śťžź\u00a0ˇ˘Ł¤Ą¦§¨©Ş«¬\u00ad®Ż°±˛ł´µ¶·¸"
     U"ąş"
     U"»Ľ˝ľżŔÁÂĂÄĹĆÇČÉĘËĚÍÎĎĐŃŇÓÔŐÖ×ŘŮÚŰÜÝŢßŕáâăäĺćçčéęëěíîďđńňóôőö÷řůúűüýţ˙",
     true},
    {U"€\u0081‚ƒ„…†‡\u0088‰\u008a‹\u008c\u008d\u008e\u008f\u0090‘’“”•–—\u0098™\u009a›\u009c\u009d"
     U"\u009e\u009f\u00a0΅Ά£¤¥¦§¨©ª«¬\u00ad®―°±²³΄µ¶·ΈΉΊ»Ό½ΎΏΐΑΒΓΔΕΖΗΘΙΚΛΜΝΞΟΠΡÒΣΤΥΦΧΨΩΪΫάέήίΰαβγδ"
     U"εζηθικλμνξοπρςστυφχψωϊϋόύώÿ",
     true},
    {U"€\u0081‚ƒ„…†‡ˆ‰Š‹Œ\u008d\u008e\u008f\u0090‘’“”•–—˜™š›œ\u009d\u009eŸ\u00a0¡¢£¤¥¦§¨©ª«¬\u00ad®"
     U"¯°"
     U"±²³´µ¶·¸¹º»¼½¾¿ÀÁÂÃÄÅÆÇÈÉÊËÌÍÎÏĞÑÒÓÔÕÖ×ØÙÚÛÜİŞßàáâãäåæçèéêëìíîïğñòóôõö÷øùúûüışÿ",
     true},
    {U"€\u0081‚\u0083„…†‡\u0088‰\u008a‹\u008c¨ˇ¸\u0090‘’“”•–—\u0098™\u009a›\u009c¯˛\u009f\u00a0¡¢£¤"
     U"¥"
     U"¦§Ø©Ŗ«¬\u00ad®Æ°±²³´µ¶·ø¹ŗ»¼½¾æĄĮĀĆÄÅĘĒČÉŹĖĢĶĪĻŠŃŅÓŌÕÖ×ŲŁŚŪÜŻŽßąįāćäåęēčéźėģķīļšńņóōõö÷ųł"
     U"śūüżž˙",
     true},
    {U"\u0080\u0081\u0082\u0083\u0084\u0085\u0086\u0087\u0088\u0089\u008a\u008b\u008c\u008d\u008e"
     U"\u008f"
     U"\u0090\u0091\u0092\u0093\u0094\u0095\u0096\u0097\u0098\u0099\u009a\u009b\u009c\u009d\u009e"
     U"\u009f"
     U"\u00a0Ą˘Ł¤ĽŚ§¨ŠŞŤŹ\u00adŽŻ°ą˛ł´ľśˇ¸šşťź˝žżŔÁÂĂÄĹĆÇČÉĘËĚÍÎĎĐŃŇÓÔŐÖ×ŘŮÚŰÜÝŢßŕáâăäĺćçčéęëěíîďđ"
     U"ńňóôőö÷řůúűüýţ˙"},
    {U"ÄÅÇÉÑÖÜáàâäãåçéèêëíìîïñóòôöõúùûü†°¢£§•¶ß®©™´¨≠ÆØ∞±≤≥¥µ∂∑∏π∫ªºΩæø¿¡¬√ƒ≈∆«»…\u00a0ÀÃÕŒœ–—“”‘’"
     U"÷◊ÿŸ⁄€‹›ﬁﬂ‡·‚„‰ÂÊÁËÈÍÎÏÌÓÔ\uf8ffÒÚÛÙıˆ˜¯˘˙˚¸˝˛ˇ",
     false, false},
    {U"ÇüéâäàåçêëèïîìÄÅÉæÆôöòûùÿÖÜ¢£¥₧ƒáíóúñÑªº¿⌐¬½¼¡«»░▒▓│┤╡╢╖╕╣║╗╝╜╛┐└┴┬├─┼╞╟╚╔╩╦╠═╬╧╨╤╥╙╘╒╓╫╪┘┌█"
     U"▄"
     U"▌▐▀αßΓπΣσµτΦΘΩδ∞φε∩≡±≥≤⌠⌡÷≈°∙·√ⁿ²■\u00a0"},
};

constexpr char lost = 0x1a;

// The text in that encoding, if it has all of its characters.
std::optional<std::string> encoded(std::u32string_view text, const Encoding& encoding) {
  std::string bytes;
  for (const char32_t c : text) {
    if (encoding.sloppy && (c == 0xfffd || c == static_cast<char32_t>(lost))) {
      if (c != 0xfffd) return {};
      bytes += lost;
    } else if (c < 0x80 || (encoding.upper.empty() && c < 0x100)) {
      bytes += static_cast<char>(c);
    } else if (const auto at = encoding.upper.find(c); at != encoding.upper.npos) {
      bytes += static_cast<char>(0x80 + at);
    } else {
      return {};
    }
  }
  return bytes;
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
  box = 1024,  // for drawing boxes
};

unsigned kind(char32_t c) {
  const auto in = [c](std::u32string_view set) { return set.find(c) != set.npos; };
  if (c < 0xa0) return other;
  if (in(U"¦¤¨¬¯¸ªºƒˆˇ˘˛˜†‡‰⌐◊�")) return strange;
  if (in(U"¶§")) return law;
  if (in(U"¢£¥€₧")) return currency;
  if (in(U"¡«¿©‘‚“„•‹΄΅\uf8ff")) return opening;
  if (in(U"®»˝”›™")) return closing;
  if (in(U"²³¹±¼½¾×µ÷⁄∂∆∏∑√∞∩∫≈≠≡≤≥№")) return number;
  if ((c >= 0xc0 && c <= 0xd1) || in(U"ØÜÝŒŠŸŽĂĀĄĆČĎĐĘĚĒĖĞĢİĪĶĹĽŁĻŃŇŅŘŚŞŢŤŮŰŹŻҐ")) return capital;
  if ((c >= 0xdf && c <= 0xf1) || in(U"üœšžăąāćčďđęěēėğģįīķĺľłļŕśşťźżґﬁﬂ")) return small;
  if ((c >= 0x3b1 && c <= 0x3c9) || (c >= 0x430 && c <= 0x45f) || in(U"άέήίΰ"))
    return small_elsewhere;
  if ((c >= 0x391 && c <= 0x3a9) || (c >= 0x401 && c <= 0x42f) || in(U"ÞΆΈΉΊΌΎΏΪΫ"))
    return capital_elsewhere;
  if (in(U"│┌┐┘├┤┬┼▀▄█▌▐░▒▓") || (c >= 0x2550 && c <= 0x256c)) return box;
  return other;
}

// Letters that faces are made of, and the degree sign.
bool is_of_faces(char32_t c) {
  return (c >= 0xd2 && c <= 0xd6) || (c >= 0xd9 && c <= 0xdc) || (c >= 0xf2 && c <= 0xf6) ||
         (c >= 0xf8 && c <= 0xfc) ||
         std::u32string_view(U"ŐŌŪŲ°").find(c) != std::u32string_view::npos;
}

// As \w of a regular expression.
bool is_word(char32_t c) {
  const auto u = static_cast<UChar32>(c);
  return c == '_' || u_isalpha(u) || u_getNumericValue(u) != U_NO_NUMERIC_VALUE;
}

bool is_ascii_letter(char32_t c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'); }

// Whether characters are combined as in no language.
bool looks_wrong(std::u32string_view text) {
  constexpr unsigned any = law | currency | opening | closing | number | small | capital | box;
  const auto in = [](char32_t c, std::u32string_view set) { return set.find(c) != set.npos; };
  for (std::size_t i = 0; i < text.size(); ++i) {
    const char32_t c = text[i];
    if (c >= 0x80 && c < 0xa0) return true;
    if (i + 1 == text.size()) break;
    const char32_t second = text[i + 1];
    const unsigned a = kind(c), b = kind(text[i + 1]);
    if (((any | strange) & a && b == strange) || (a == strange && any & b)) return true;
    if ((small | small_elsewhere | closing | currency | number | box) & a && b == capital)
      return true;
    if ((closing | currency | number | box) & a && b == small) return true;
    if ((small | closing | box) & a && b == currency) return true;
    if ((capital | box) & a && (number | law) & b) return true;
    if (a == capital && second == U'°') return true;
    if ((currency | number | box) & a && b == opening) return true;
    if (a == box && (b == closing || is_of_faces(second))) return true;
    if (any & ~box & a && b == box) return true;
    if ((c == U'œ' || c == U'Œ') && !is_ascii_letter(second)) return true;
    // What Windows-1252 makes of the leads C2, C3, CE and D0, and more of the kind.
    if (in(c, U"ÂÃÎÐ") && (in(second, U"€œŠš¢£Ÿž\u00a0\u00ad®©°·»–—´") || (opening | closing) & b))
      return true;
    if (c == U'Ã' && second == U'¡') return true;
    // Mac Roman, and the beginning of U+2000 to U+203F in Windows-1251 and 1257.
    if ((c == U'√' && in(second, U"±∂†≠®™´≤≥¥µø")) || (c == U'≈' && in(second, U"°¢"))) return true;
    if ((c == U'в' && second == U'Ђ') || (c == U'ā' && second == U'€')) return true;
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
    if ((small | capital | currency | closing | box) & a && b == opening && d == number)
      return true;
    if ((small | capital | currency | number | law | box) & a && b == closing && d == opening)
      return true;
    if (((c >= 'a' && c <= 'z') || is_space(c)) && b == capital && d == currency) return true;
    if (c >= 'a' && c <= 'z' && b == capital && d == opening) return true;
    if ((small | capital) & a && (opening | closing) & b && is_word(third)) return true;
    if (is_ascii_letter(c) && (small_elsewhere | capital_elsewhere) & b && d == strange)
      return true;
    if (((c >= 'a' && c <= 'z') || in(c, U".,?!") || a == closing) && second == U'Â' &&
        (third == ' ' || (opening | closing) & d))
      return true;
    // Mac Roman; U+2000 to U+203F in Windows-1253.
    if (c == U'‚' && ((second == U'Ä' && in(third, U"ìîïòôúùû†°¢π")) ||
                      (in(second, U"âó") && in(third, U"àä°ê"))))
      return true;
    if (c == U'β' && second == U'€' && in(third, U"™\u00a0Ά\u00ad®°")) return true;
    // Two leads of Windows-1251 or 1253.
    const bool between = (strange | opening | closing | currency) & b || second == U'°' ||
                         (second >= 0x80 && second < 0xa0);
    if (in(c, U"ВГРС") && in(third, U"ВГРС") && (between || second == U'µ')) return true;
    if (in(c, U"ΒΓΞΟ") && in(third, U"ΒΓΞΟ") && between) return true;
    if (text.substr(i).starts_with(U"ГўВЂВ") && i + 6 < text.size() && text[i + 5] != U'\n' &&
        (is_ascii_letter(text[i + 6]) || text[i + 6] == ' '))
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

// The bytes as UTF-8, if they are; also with characters in two surrogates of three bytes each
// (CESU-8), and with U+0000 as C0 80.
std::optional<std::u32string> decoded(const std::string& bytes) {
  std::u32string out;
  const auto length = static_cast<std::int32_t>(bytes.size());
  const auto at = [&](std::int32_t i) {
    return i < length ? static_cast<unsigned char>(bytes[static_cast<std::size_t>(i)]) : 0u;
  };
  // The surrogate in three bytes at `i`, 0 where there is none.
  const auto surrogate = [&](std::int32_t i, unsigned second) {
    const bool is = at(i) == 0xed && (at(i + 1) & 0xf0) == second && (at(i + 2) & 0xc0) == 0x80;
    return is ? 0xd000 | (at(i + 1) & 0x3f) << 6 | (at(i + 2) & 0x3f) : 0u;
  };
  for (std::int32_t i = 0; i < length;) {
    const unsigned high = surrogate(i, 0xa0), low = surrogate(i + 3, 0xb0);
    if (high != 0 && low != 0) {
      out.push_back(0x10000 + ((high & 0x3ff) << 10 | (low & 0x3ff)));
      i += 6;
      continue;
    }
    if (at(i) == 0xc0 && at(i + 1) == 0x80) {
      out.push_back(0);
      i += 2;
      continue;
    }
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

// Whether one UTF-8 sequence stands at `i` of which bytes were lost, and its length; 0: none. For
// one lost byte there may be a question mark.
std::size_t lossy_sequence(std::string_view bytes, std::size_t i) {
  const auto at = [&](std::size_t k) {
    return k < bytes.size() ? static_cast<unsigned char>(bytes[k]) : 0u;
  };
  const auto gone = [&](std::size_t k) { return at(k) == static_cast<unsigned char>(lost); };
  const auto asked = [&](std::size_t k) { return gone(k) || at(k) == '?'; };
  const auto tail = [&](std::size_t k) { return gone(k) || (at(k) >= 0x80 && at(k) < 0xc0); };
  const unsigned lead = at(i);
  if (lead >= 0xc2 && lead <= 0xdf && gone(i + 1)) return 2;
  if ((lead == 0xc2 || lead == 0xc3) && at(i + 1) == '?') return 2;
  if (lead == 0xed && at(i + 1) >= 0xa0 && at(i + 1) <= 0xaf && at(i + 3) == 0xed &&
      at(i + 4) >= 0xb0 && at(i + 4) <= 0xbf &&
      ((asked(i + 2) && (asked(i + 5) || tail(i + 5))) || (tail(i + 2) && asked(i + 5))))
    return 6;
  const std::size_t tails = lead >= 0xe0 && lead <= 0xef ? 2 : lead >= 0xf0 && lead <= 0xf4 ? 3 : 0;
  for (std::size_t k = 1; k <= tails; ++k) {
    bool fits = asked(i + k);
    for (std::size_t other = 1; other <= tails; ++other)
      fits = fits && (other == k || tail(i + other));
    if (fits) return tails + 1;
  }
  return gone(i) ? 1 : 0;
}

// Such sequences as U+FFFD.
std::string with_lost_characters(const std::string& bytes) {
  std::string out;
  for (std::size_t i = 0; i < bytes.size();) {
    const std::size_t n = lossy_sequence(bytes, i);
    if (n > 0)
      out += "\xef\xbf\xbd";
    else
      out += bytes[i];
    i += std::max<std::size_t>(n, 1);
  }
  return out;
}

// What the leads of UTF-8 sequences, of 2, 3 and 4 bytes, and their tails become when read as
// Latin-1, Windows-1250 to 1257 or Latin-2.
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
char32_t windows_1252(char32_t c) {
  return c >= 0x80 && c < 0xa0 ? windows_1252_upper[c - 0x80] : c;
}

// The text with such sequences decoded, once; itself where nothing looks wrong.
std::u32string repair_encoding(const std::u32string& text) {
  if (!looks_wrong(text)) return text;
  for (const Encoding& encoding : encodings) {
    std::optional<std::string> bytes = encoded(text, encoding);
    if (!bytes) continue;
    if (encoding.restores_a0) bytes = with_a0(*bytes);
    if (encoding.sloppy) bytes = with_lost_characters(*bytes);
    if (const auto fixed = decoded(*bytes)) return *fixed;
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

// The characters of the reference &name;, or of one that was written in capitals: &EACUTE; is É.
std::string character_of(const std::string& name) {
  const std::string whole = "&" + name + ";", known = named_character(name);
  const auto is_small = [](char c) { return c >= 'a' && c <= 'z'; };
  if (!known.empty() || std::ranges::any_of(name, is_small) || html_unescape(whole) != whole)
    return known;
  std::string capitals;
  icu::UnicodeString::fromUTF8(named_character(lower_case(name)))
      .toUpper(icu::Locale::getRoot())
      .toUTF8String(capitals);
  return capitals;
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
        name[0] == '#' ? html_unescape(text.substr(i, end - i)) : character_of(name);
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
