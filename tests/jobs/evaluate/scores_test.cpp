#include "jobs/evaluate/scores.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/error.h"
#include "core/json.h"
#include "data/text_images/polygon.h"

namespace weft {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

// Rows: predicted rightly, predicted, labelled.
const std::vector<std::int64_t> first = {3, 0, 2, 0, /**/ 4, 1, 3, 0, /**/ 5, 0, 3, 0};
const std::vector<std::int64_t> second = {1, 0, 0, 0, /**/ 1, 1, 0, 0, /**/ 1, 0, 1, 0};

TEST(SegmentationScores, AddsUpImages) {
  SegmentationScores e({"wall", "sky", "tree", "boat"});
  e.add(first);
  e.add(second);
  EXPECT_EQ(e.images, 2);
  EXPECT_EQ(e.pixels, 10);
  EXPECT_EQ(e.correct, 6);
  EXPECT_DOUBLE_EQ(e.accuracy(), 0.6);
  // wall: 4 of 5 + 6 - 4; sky: 0 of 2; tree: 2 of 3 + 4 - 2; boat occurs nowhere.
  EXPECT_EQ(e.classes[0].joined(), 7);
  EXPECT_EQ(e.classes[1].joined(), 2);
  EXPECT_EQ(e.classes[2].joined(), 5);
  EXPECT_EQ(e.classes[3].joined(), 0);
  EXPECT_NEAR(e.mean_iou(), (4.0 / 7 + 0 + 2.0 / 5 + 0) / 4, 1e-10);
  EXPECT_EQ(e.known(), 2);
  EXPECT_NEAR(e.mean_iou_of_known(), (4.0 / 7 + 2.0 / 5) / 2, 1e-10);
  EXPECT_THAT(e.by_iou(), ElementsAre(0, 2, 1, 3));
  EXPECT_THAT(e.table(), HasSubstr("neither labelled nor predicted: 1 class\n"));
  EXPECT_THAT(e.table(), Not(HasSubstr("boat")));
}

TEST(SegmentationScores, CountsPassThroughALine) {
  nlohmann::ordered_json line;
  put_counts(line, first);
  EXPECT_EQ(line["pixels"], 8);
  EXPECT_EQ(line["correct"], 5);
  EXPECT_EQ(line["classes"], (std::vector<int>{0, 1, 2}));  // boat is left out
  EXPECT_EQ(get_counts(line, 4), first);
  // A line of a model with more classes.
  EXPECT_THROW(get_counts(line, 2), Error);
}

TEST(SegmentationScores, Quantiles) {
  SegmentationScores e({"wall"});
  EXPECT_EQ(e.seconds_at(0.5), 0);
  for (int i = 20; i >= 1; --i) e.seconds.push_back(i);
  EXPECT_EQ(e.seconds_at(0.5), 10);
  EXPECT_EQ(e.seconds_at(0.95), 19);
  EXPECT_EQ(e.seconds_at(1), 20);
}

TEST(SegmentationScores, WithoutALabel) {
  SegmentationScores e({"wall", "sky"});
  e.add(std::vector<std::int64_t>(6));
  EXPECT_EQ(e.accuracy(), 0);
  EXPECT_EQ(e.mean_iou(), 0);
  EXPECT_EQ(e.mean_iou_of_known(), 0);
  EXPECT_THAT(e.table(), HasSubstr("0 labelled pixels"));
}

Polygon rectangle(double x, double y, double width, double height) {
  return {{x, y}, {x + width, y}, {x + width, y + height}, {x, y + height}};
}

TEST(TextMatcher, TakesTheFirstFreeBoxAboveHalf) {
  const std::vector<TextRegion> regions = {{rectangle(0, 0, 10, 10)}, {rectangle(20, 0, 10, 10)}};
  const std::vector<FoundText> boxes = {
      {rectangle(0, 0, 10, 5), 0.9},    // IoU with the first is just 1/2: too little
      {rectangle(0, 0, 10, 6), 0.8},    // 0.6
      {rectangle(0, 0, 10, 10), 0.7},   // 1, but the first is taken by then
      {rectangle(21, 0, 10, 10), 0.4},  // 9/11 with the second
  };
  const TextMatcher matcher(regions, boxes);
  const TextMatch all = matcher.match(0.3);
  EXPECT_THAT(all.box_of, ElementsAre(1, 3));
  EXPECT_THAT(all.region_of, ElementsAre(TextMatch::none, 0, TextMatch::none, 1));
  EXPECT_EQ(all.counts.wanted, 2);
  EXPECT_EQ(all.counts.found, 4);
  EXPECT_EQ(all.counts.matched, 2);
  EXPECT_DOUBLE_EQ(all.counts.precision(), 0.5);
  EXPECT_DOUBLE_EQ(all.counts.recall(), 1);
  EXPECT_DOUBLE_EQ(all.counts.hmean(), 2.0 / 3);
  // Without the box of 0.4, and then with the first box alone.
  EXPECT_THAT(matcher.match(0.5).region_of,
              ElementsAre(TextMatch::none, 0, TextMatch::none, TextMatch::left_out));
  EXPECT_EQ(matcher.match(0.85).counts.found, 1);
  EXPECT_EQ(matcher.match(0.85).counts.matched, 0);
}

TEST(TextMatcher, OneBoxMatchesOneRegion) {
  const std::vector<TextRegion> regions = {{rectangle(0, 0, 10, 10)}, {rectangle(0, 0, 10, 10)}};
  const std::vector<FoundText> boxes = {{rectangle(0, 0, 10, 10), 1}};
  EXPECT_THAT(TextMatcher(regions, boxes).match(0).box_of, ElementsAre(0, TextMatch::none));
}

TEST(TextMatcher, BoxesWithinIgnoredRegionsDoNotCount) {
  const std::vector<TextRegion> regions = {{rectangle(0, 0, 10, 10), true},
                                           {rectangle(0, 0, 10, 11), false}};
  const std::vector<FoundText> boxes = {
      {rectangle(5, 0, 10, 10), 1},  // by half in it: counts, and is wrong
      {rectangle(4, 0, 10, 10), 1},  // by 0.6
      {rectangle(0, 0, 10, 11), 1},  // exactly the other region, but nearly all of it is ignored
  };
  const TextMatch m = TextMatcher(regions, boxes).match(0);
  EXPECT_THAT(m.region_of, ElementsAre(TextMatch::none, TextMatch::ignored, TextMatch::ignored));
  EXPECT_THAT(m.box_of, ElementsAre(TextMatch::ignored, TextMatch::none));
  EXPECT_EQ(m.counts.wanted, 1);
  EXPECT_EQ(m.counts.found, 1);
  EXPECT_EQ(m.counts.matched, 0);
}

TEST(TextMatcher, NothingWantedAndNothingFound) {
  const TextMatch m = TextMatcher({}, {}).match(0.3);
  EXPECT_EQ(m.counts.hmean(), 0);
  EXPECT_EQ(m.counts.precision(), 0);
}

TEST(DetectionScores, AddsUpLines) {
  const std::vector<TextRegion> regions = {{rectangle(0, 0, 10, 10)},
                                           {rectangle(90, 0, 5, 5), true}};
  const std::vector<FoundText> boxes = {{rectangle(0, 0, 10, 10), 0.65},
                                        {rectangle(40, 0, 10, 10), 0.45}};
  DetectionScores scores(0.35);
  EXPECT_THAT(scores.thresholds, ElementsAre(0.35, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9));
  nlohmann::ordered_json line;
  put_matches(line, TextMatcher(regions, boxes), scores.thresholds);
  scores.add(line);
  scores.add(parse_json<nlohmann::ordered_json>(dump_json(line)));
  EXPECT_EQ(scores.images, 2);
  EXPECT_EQ(scores.ignored, 2);
  EXPECT_EQ(scores.counts[0].wanted, 2);
  EXPECT_EQ(scores.counts[0].found, 4);
  EXPECT_EQ(scores.counts[0].matched, 2);
  EXPECT_EQ(scores.counts[2].found, 2);    // at 0.5
  EXPECT_EQ(scores.counts[4].matched, 0);  // at 0.7
  EXPECT_EQ(scores.best(), 2u);
  const nlohmann::ordered_json j = scores.json();
  EXPECT_DOUBLE_EQ(j["hmean"], 2.0 / 3);
  EXPECT_DOUBLE_EQ(j["best_hmean"], 1);
  EXPECT_DOUBLE_EQ(j["best_score"], 0.5);
  EXPECT_EQ(j["scores"].size(), 7u);
  EXPECT_THAT(scores.table(), HasSubstr("Hmean 66.67 % (precision 50.00 %, recall 100.00 %)"));
  // A line of another deck.
  EXPECT_THROW(DetectionScores(0.3).add(line), Error);
}

TEST(Outlines, StayInThePicture) {
  const ImageSize size{20, 30};
  std::vector<std::uint8_t> rgb(20 * 30 * 3, 9);
  const Rgb red{255, 0, 0};
  draw_outline(rgb, size, rectangle(5, 5, 10, 8), red, 1);
  const auto red_at = [&](std::size_t x, std::size_t y) { return rgb[3 * (y * 30 + x)] == 255; };
  int count = 0;
  for (std::size_t i = 0; i < rgb.size(); i += 3) count += rgb[i] == 255;
  EXPECT_EQ(count, 2 * (10 + 8));
  EXPECT_TRUE(red_at(5, 5) && red_at(15, 13) && red_at(10, 5) && red_at(5, 9));
  EXPECT_FALSE(red_at(10, 9));
  // Corners however far: the line through the middle, y = 10, remains.
  draw_outline(rgb, size, std::vector<Point>{{-1e300, 10}, {1e300, 10}}, red, 1);
  for (std::size_t x = 0; x < 30; ++x) EXPECT_TRUE(red_at(x, 10)) << x;
  draw_outline(rgb, size, rectangle(-500, -500, 5000, 5000), red, 3);
  draw_outline(rgb, size, std::vector<Point>{{0 / 0.0, 1}, {2, 3}, {1, 1}}, red, 1);
}

}  // namespace
}  // namespace weft
