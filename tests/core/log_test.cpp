#include <gtest/gtest.h>

#include <algorithm>

#include "core/log.h"

namespace weft {
namespace {

TEST(Log, CountedNouns) {
  EXPECT_EQ(counted(0, "file"), "0 files");
  EXPECT_EQ(counted(1, "file"), "1 file");
  EXPECT_EQ(counted(2, "file"), "2 files");
  EXPECT_EQ(counted(1, "class", "classes"), "1 class");
  EXPECT_EQ(counted(2, "class", "classes"), "2 classes");
}

int lines_of(const std::string& text) { return static_cast<int>(std::ranges::count(text, '\n')); }

TEST(Log, OfManyWarningsOfAKindSomeAreShownAndAllAreCounted) {
  log::sum_up_warnings();
  testing::internal::CaptureStderr();
  for (int i = 0; i < 100; ++i) log::warn("left out: pictures/{}/cat.png has {} labels", i, 2 * i);
  log::warn("the disk is slow");
  std::string said = testing::internal::GetCapturedStderr();
  // 10 and the 16th, 32nd and 64th, and the other kind.
  EXPECT_EQ(lines_of(said), 14) << said;
  EXPECT_NE(said.find("pictures/63/cat.png has 126 labels (number 64 of this kind)"), said.npos);
  EXPECT_NE(said.find("the disk is slow"), said.npos);
  testing::internal::CaptureStderr();
  log::sum_up_warnings();
  log::sum_up_warnings();
  said = testing::internal::GetCapturedStderr();
  EXPECT_EQ(lines_of(said), 1) << said;
  EXPECT_NE(said.find("WARN: 87 warnings more like this: left out:"), said.npos) << said;
  EXPECT_EQ(log::warnings().back(), said.substr(6, said.size() - 7));
}

TEST(Log, KindsOfWarnings) {
  using log::kind_of_warning;
  EXPECT_EQ(kind_of_warning("step 12: loss spike: 0.5 (samples 1 2 3)"),
            kind_of_warning("step 120: loss spike: 7e-3 (samples 4 5)"));
  EXPECT_EQ(kind_of_warning("no clip from a/b.mp4: it ends."),
            kind_of_warning("no clip from c_d: it ends."));
  EXPECT_NE(kind_of_warning("no clip from a.mp4: it ends"),
            kind_of_warning("no clip from a.mp4: too dark"));
}

// A name with a line break must not look like a message of weft's own.
TEST(Log, AMessageIsOneLine) {
  testing::internal::CaptureStderr();
  log::warn("cannot read {}", "a\nERROR: b\x1b[2J");
  Error e(Exit::data, "no picture a\nERROR: b", "look at\nHINT: c");
  e.with_below("  rank  host\n     0  n\x1b[2J");
  log::report(e);
  EXPECT_EQ(testing::internal::GetCapturedStderr(),
            "WARN: cannot read a\\nERROR: b\\x1b[2J\n"
            "ERROR: no picture a\\nERROR: b\n  rank  host\n     0  n\\x1b[2J\n"
            "HINT: look at\\nHINT: c\n");
}

}  // namespace

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
