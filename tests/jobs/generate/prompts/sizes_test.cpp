// Names of sizes and lengths, against docs/generate_reference.md, Sizes.
#include "jobs/generate/prompts/sizes.h"
#include "jobs/generate/options.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/error.h"

namespace weft {
namespace {

PixelSize size_of(const std::string& resolution, const std::string& ratio) {
  return clip_size(GenerateDeck(), "1", resolution, ratio);
}

TEST(Sizes, FindsOpenSorasSizes) {
  const std::vector<std::pair<const char*, PixelSize>> wide = {
      {"144p", {1, 144, 256}}, {"240p", {1, 240, 426}},  {"360p", {1, 360, 640}},
      {"480p", {1, 480, 854}}, {"720p", {1, 720, 1280}}, {"1080p", {1, 1080, 1920}}};
  for (const auto& [name, size] : wide) {
    EXPECT_EQ(size_of(name, "9:16"), size) << name;
    EXPECT_EQ(size_of(name, "16:9"), (PixelSize{1, size.width, size.height})) << name;
  }
  EXPECT_EQ(size_of("256", "1:1"), (PixelSize{1, 256, 256}));
  EXPECT_EQ(size_of("512", "12:25"), (PixelSize{1, 352, 736}));
  GenerateDeck deck;
  deck.image_size = {100, 33};
  EXPECT_EQ(clip_size(deck, "2s", "nothing", "nothing"), (PixelSize{51, 100, 33}));
}

TEST(Sizes, RefusesOthers) {
  EXPECT_THROW(size_of("241p", "9:16"), Error);
  EXPECT_THROW(size_of("240p", "9:15"), Error);
  GenerateDeck deck;
  deck.image_size = {100};
  EXPECT_THROW(clip_size(deck, "1", "240p", "9:16"), Error);
  try {
    size_of("256", "9:16");
    ADD_FAILURE();
  } catch (const Error& e) {
    EXPECT_STREQ(e.what(), "resolution 256 has no size for aspect ratio 9:16");
    EXPECT_THAT(e.hint(), ::testing::HasSubstr("12:25, 1:2, 1:1, 2:1"));
  }
}

TEST(Sizes, CountsFrames) {
  const std::vector<std::pair<const char*, int>> known = {
      {"1", 1},    {"16", 16},   {"1x", 51},       {"2s", 51},    {"4s", 102}, {"2x", 102},
      {"8s", 204}, {"16s", 408}, {"16x/32s", 816}, {"2s/1x", 51}, {"32s", 816}};
  for (const auto& [text, frames] : known) EXPECT_EQ(frame_count(text), frames) << text;
  for (const char* bad :
       {"", "0", "-3", "3s", "two", "1.5", "51f", "2x/junk", "2x/", "/2x", "2x/2s", "2x/4s/4s"})
    EXPECT_THROW(frame_count(bad), Error) << bad;
}

}  // namespace
}  // namespace weft
