#include "core/log.h"

#include <gtest/gtest.h>

namespace weft {
namespace {

TEST(Printable, LeavesText) {
  for (const char* text : {"", "a cat, 2 dogs", "Käse \\n 日本語 🙂", "ü"})
    EXPECT_EQ(printable(text), text);
}

TEST(Printable, EscapesWhatATerminalObeys) {
  EXPECT_EQ(printable("a\nERROR: b\r\tc"), "a\\nERROR: b\\r\\tc");
  EXPECT_EQ(printable("\x1b[2J\x7f"), "\\x1b[2J\\x7f");
  EXPECT_EQ(printable(std::string_view("a\0b", 3)), "a\\x00b");
  EXPECT_EQ(printable("\u009b2J"), "\\u009b2J");           // CSI in one character
  EXPECT_EQ(printable("\u2028\u2029"), "\\u2028\\u2029");  // ends of lines
}

TEST(Printable, EscapesWhatTurnsText) {
  for (const auto& [text, escaped] : {std::pair("\u202e", "\\u202e"),
                                      {"\u202a", "\\u202a"},
                                      {"\u2066", "\\u2066"},
                                      {"\u2069", "\\u2069"},
                                      {"\u200e", "\\u200e"},
                                      {"\u200f", "\\u200f"},
                                      {"\u061c", "\\u061c"}})
    EXPECT_EQ(printable("gpj" + std::string(text) + ".exe"), "gpj" + std::string(escaped) + ".exe");
}

TEST(Printable, EscapesBytesThatAreNoUtf8) {
  EXPECT_EQ(printable("caf\xe9.png"), "caf\\xe9.png");
  EXPECT_EQ(printable("\x9b"
                      "2J"),
            "\\x9b2J");
  EXPECT_EQ(printable("a\xe6\x97"), "a\\xe6\\x97");         // cut off
  EXPECT_EQ(printable("\xed\xa0\x80"), "\\xed\\xa0\\x80");  // a surrogate
  EXPECT_EQ(printable("\xc0\x8a"), "\\xc0\\x8a");           // a line break in two bytes
}

TEST(Printable, LeavesOutTheMiddleOfLongText) {
  const std::string text = printable("begin " + std::string(1000, 'x') + " end", 40);
  EXPECT_EQ(text, "begin " + std::string(24, 'x') + "..." + "xxxxxx end");
  // No character is cut: ü has two bytes.
  std::string many;
  for (int i = 0; i < 100; ++i) many += "ü";
  const std::string cut = printable(many, 21);
  EXPECT_EQ(cut.find('\\'), cut.npos) << cut;
}

TEST(Printable, KeepsWhatIsAskedFor) {
  EXPECT_EQ(printable("a\n\tb\x1b", 100, "\n\t"), "a\n\tb\\x1b");
}

}  // namespace
}  // namespace weft
