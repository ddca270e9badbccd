// Mask strategies: the notation, where frames go, and the examples of docs/generate_reference.md,
// Masks.
#include "jobs/generate/prompts/mask_strategy.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/error.h"

namespace weft {
namespace {

using ::testing::HasSubstr;

std::vector<Placement> place(const std::string& text, std::int64_t frames,
                             const std::vector<std::int64_t>& references, std::int64_t align = 5,
                             std::int64_t loop = 0) {
  return place_references(parse_mask_strategy(text, "p"), loop, frames, references, align, "p");
}

void expect(const Placement& p, std::int64_t reference, std::int64_t from, std::int64_t to,
            std::int64_t length, double edit) {
  EXPECT_EQ(p.reference, reference);
  EXPECT_EQ(p.from, from);
  EXPECT_EQ(p.to, to);
  EXPECT_EQ(p.length, length);
  EXPECT_EQ(p.edit, edit);
}

TEST(MaskStrategy, TheExamples) {
  // Image to video.
  auto p = place("0", 15, {1});
  ASSERT_EQ(p.size(), 1u);
  expect(p[0], 0, 0, 0, 1, 0);
  // Two images connected: the last latent frame becomes the start of the last chunk.
  p = place("0;0,1,0,-1,1", 15, {1, 1});
  ASSERT_EQ(p.size(), 2u);
  expect(p[1], 1, 0, 10, 1, 0);
  // A video edited, as far as it reaches.
  p = place("0,0,0,0,30,0.5", 15, {20});
  expect(p[0], 0, 0, 0, 15, 0.5);
  // A video continued backwards: its first frames are the last of the clip.
  p = place("0,0,0,-5,5", 15, {5});
  expect(p[0], 0, 0, 10, 5, 0);
  // What the next loop gets of the clip before.
  EXPECT_TRUE(place("1,0,-5,0,5,0.25", 15, {15}).empty());
  p = place("1,0,-5,0,5,0.25", 15, {15}, 5, 1);
  expect(p[0], 0, 10, 0, 5, 0.25);
}

TEST(MaskStrategy, EditRatios) {
  EXPECT_EQ(edit_ratios(place("0;0,1,0,-1,1,0.5", 7, {1, 1}, 0), 7),
            (std::vector<float>{0, 1, 1, 1, 1, 1, 0.5}));
  EXPECT_EQ(edit_ratios({}, 3), (std::vector<float>{1, 1, 1}));
}

TEST(MaskStrategy, FramesThatAreTaken) {
  const auto taken = [](const std::string& text, std::int64_t reference, std::int64_t align) {
    const LatentRange r =
        frames_taken(parse_mask_strategy(text, "p"), 2, reference, 12, 15, align, "p");
    return std::pair(r.first, r.last);
  };
  EXPECT_EQ(taken("0,0,-5,0,5", 0, 0), std::pair(std::int64_t{7}, std::int64_t{12}));
  EXPECT_EQ(taken("0,0,-5,0,5", 0, 5), std::pair(std::int64_t{5}, std::int64_t{10}));
  // All groups of the loops that there are, of this reference alone.
  EXPECT_EQ(taken("0,1,9,0,1;1,1,2,0,2;2,1,0;0,0,11", 1, 0),
            std::pair(std::int64_t{2}, std::int64_t{10}));
  EXPECT_EQ(taken("0,1;2,0", 0, 5), std::pair(std::int64_t{0}, std::int64_t{0}));
  EXPECT_THROW(taken("0,0,0,20", 0, 0), Error);
}

TEST(MaskStrategy, SnapsToChunks) {
  const std::int64_t expected[] = {0, 0, 0, 5, 5, 5, 5, 5, 10, 10, 10, 10, 10, 10, 10};
  for (std::int64_t v = 0; v < 15; ++v) EXPECT_EQ(snap(v, 5, 15), expected[v]) << v;
  EXPECT_EQ(snap(14, 0, 15), 14);
  EXPECT_EQ(snap(3, 4, 12), 4);  // more than the half of 4
  EXPECT_EQ(snap(2, 4, 12), 0);  // the half itself stays
}

TEST(MaskStrategy, RefusesWhatIsBroken) {
  const auto error = [](const std::string& text, const std::vector<std::int64_t>& references) {
    try {
      place(text, 15, references);
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), Exit::data);
      return std::string(e.what());
    }
    return std::string("no error");
  };
  EXPECT_THAT(error("0;", {1}), HasSubstr("group \"\""));
  EXPECT_THAT(error("a", {1}), HasSubstr("\"a\" is no number"));
  EXPECT_THAT(error("0,0,0.5", {1}), HasSubstr("\"0.5\" is no number"));
  EXPECT_THAT(error("0,0,0,0,1,0,9", {1}), HasSubstr("has 7 fields"));
  EXPECT_THAT(error("0,0,0,0,1,1.5", {1}), HasSubstr("edit ratio 1.5"));
  EXPECT_THAT(error("0,0,0,0,0", {1}), HasSubstr("length 0"));
  EXPECT_THAT(error("0,1", {1}), HasSubstr("asks for reference 1, there are 1"));
  EXPECT_THAT(error("0", {}), HasSubstr("there are 0"));
  EXPECT_THAT(error("0,0,-7", {5}), HasSubstr("places latent frame -7"));
  EXPECT_THAT(error("0,0,0,20", {5}), HasSubstr("at 20 of a clip of 15"));
  EXPECT_EQ(error("", {}), "no error");
}

}  // namespace
}  // namespace weft
