#include "core/clock.h"

#include <gtest/gtest.h>

namespace weft {
namespace {

TEST(Statistics, Medians) {
  EXPECT_EQ(median({}), 0);
  EXPECT_EQ(upper_median({}), 0);
  EXPECT_EQ(median({3, 1, 2}), 2);
  EXPECT_EQ(upper_median({3, 1, 2}), 2);
  EXPECT_EQ(median({4, 1, 3, 2}), 2.5);
  EXPECT_EQ(upper_median({4, 1, 3, 2}), 3);
}

}  // namespace
}  // namespace weft
