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

}  // namespace
}  // namespace weft
