// The store of what oneDNN makes (src/ops/cpu/onednn.h).
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <dnnl.hpp>
#include <map>
#include <utility>

namespace weft::test {
namespace {

#include "ops/cpu/onednn.h"

TEST(Recent, KeepsWhatWasUsedLast) {
  Recent<int, int> kept;
  int made = 0;
  const auto get = [&](int key) {
    return kept.get(key, [&] {
      ++made;
      return 2 * key;
    });
  };
  constexpr int many = 2000;
  for (int key = 1; key <= many; ++key) {
    EXPECT_EQ(get(key), 2 * key);
    EXPECT_EQ(get(0), 0);  // in use all the time
  }
  EXPECT_EQ(made, many + 1);
  for (int key = many - 100; key <= many; ++key) get(key);
  EXPECT_EQ(made, many + 1);  // all there still
  get(1);
  EXPECT_EQ(made, many + 2);  // dropped long ago
}

}  // namespace
}  // namespace weft::test
