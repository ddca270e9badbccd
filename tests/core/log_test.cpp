#include "core/log.h"

#include <gtest/gtest.h>

namespace weft {
namespace {

TEST(Log, CountedNouns) {
  EXPECT_EQ(counted(0, "file"), "0 files");
  EXPECT_EQ(counted(1, "file"), "1 file");
  EXPECT_EQ(counted(2, "file"), "2 files");
  EXPECT_EQ(counted(1, "class", "classes"), "1 class");
  EXPECT_EQ(counted(2, "class", "classes"), "2 classes");
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
}  // namespace weft
