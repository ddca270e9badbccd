// How well boxes match the text regions of pictures, by the rule of ICDAR's competitions
// (docs/models/dbnet.md, Evaluation).
#pragma once

#include <span>

#include "data/text_images/text_images.h"
#include "jobs/evaluate/record.h"

namespace weft {

// A box found in a picture, in its pixels.
struct FoundText {
  Polygon polygon;
  double score = 0;
};

// Regions that count, boxes that count, and pairs of both, in one picture or in all.
struct DetectionCounts {
  std::int64_t wanted = 0, found = 0, matched = 0;
  double precision() const;
  double recall() const;
  double hmean() const;
};

// One picture's boxes of at least some score beside its regions.
struct TextMatch {
  DetectionCounts counts;
  // Of each region its box, of each box its region: a number, or one of the others.
  static constexpr int none = -1, ignored = -2, left_out = -3;
  std::vector<int> box_of, region_of;
};

class TextMatcher {
 public:
  // Exit::data for a polygon far outside any picture. Both lists outlive the matcher.
  TextMatcher(std::span<const TextRegion> regions, std::span<const FoundText> boxes);
  // Boxes below the score are left out. One that lies by more than half of its area in an ignored
  // region does not count. Each region that is not ignored takes, in their order, the first box
  // that is free and overlaps it by an IoU above 0.5.
  TextMatch match(double least_score) const;

 private:
  struct Overlap {
    std::size_t region, box;
    double iou, share;  // share: of the box's area
  };
  std::span<const TextRegion> regions_;
  std::span<const FoundText> boxes_;
  std::vector<Overlap> overlaps_;  // by region, then by box
};

// Scores from which on a box counts: `least`, and each tenth above it.
std::vector<double> score_thresholds(double least);

struct DetectionScores : EvaluationRecord {
  std::vector<double> thresholds;       // the first is the deck's
  std::vector<DetectionCounts> counts;  // [thresholds], over all pictures
  std::int64_t ignored = 0;             // regions

  explicit DetectionScores(double least_score);
  // One picture, of a line that put_matches made. Exit::data for a line of other thresholds.
  void add(const nlohmann::ordered_json& line);
  std::size_t best() const;  // of the greatest Hmean, the first of equal ones

  nlohmann::ordered_json json() const;
  std::string table() const;  // for a terminal
};

// One picture's counts at each threshold as members of a line.
void put_matches(nlohmann::ordered_json& line, const TextMatcher& matcher,
                 std::span<const double> thresholds);

}  // namespace weft
