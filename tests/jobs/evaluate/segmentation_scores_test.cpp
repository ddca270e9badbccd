#include "jobs/evaluate/segmentation_scores.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/error.h"

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

}  // namespace
}  // namespace weft
