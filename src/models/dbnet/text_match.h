// How well boxes fit a picture's text regions, by the rule of ICDAR's competitions
// (docs/models/dbnet.md, Evaluation).
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "data/text_images/text_images.h"
#include "models/dbnet/boxes.h"
#include "models/dbnet/detector.h"

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
  // The box of each region, and the region of each box: a number, or one of these values.
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

// The boxes of a probability map (Detector::detect; empty: none) of a picture of `picture` pixels
// that was shown as `view`.
std::vector<FoundText> found_text(std::span<const float> probability, const ViewSize& view,
                                  ImageSize picture, const PostprocessDeck& deck);

}  // namespace weft
