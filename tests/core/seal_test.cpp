#include "core/hash.h"

#include <gtest/gtest.h>

namespace weft {
namespace {

TEST(Seal, HoldsUntilABitChanges) {
  for (const std::string& sealed :
       {seal_json(R"({"step":3,"loss":0.25})") + "\n", seal_text("[run]\ndir = \"run\"\n")}) {
    EXPECT_TRUE(seal_holds(sealed)) << sealed;
    EXPECT_TRUE(seal_holds(sealed.substr(0, sealed.size() - 1))) << sealed;
    const std::size_t data = sealed.find("xxh3") - 2;
    for (std::size_t bit = 0; bit < data * 8; ++bit) {
      std::string flipped = sealed;
      flipped[bit / 8] = static_cast<char>(flipped[bit / 8] ^ 1 << bit % 8);
      EXPECT_FALSE(seal_holds(flipped)) << flipped;
    }
  }
}

TEST(Seal, TextsWithoutOneHold) {
  for (const char* text : {"", "\n", "{}", "{\"step\":3}", "# a comment\n", "\"}"})
    EXPECT_TRUE(seal_holds(text)) << text;
}

TEST(Seal, StaysJsonAndToml) {
  EXPECT_EQ(seal_json("{\"a\":1}").substr(0, 14), "{\"a\":1,\"xxh3\":");
  EXPECT_EQ(seal_text("a = 1\n").substr(0, 13), "a = 1\n# xxh3 ");
}

}  // namespace
}  // namespace weft
