#include "models/dbnet/text_match.h"

#include <algorithm>

#include "data/text_images/polygon.h"

namespace weft {
namespace {

constexpr double least_iou = 0.5, least_ignored_share = 0.5;  // both strictly above

double ratio(std::int64_t part, std::int64_t whole) {
  return whole > 0 ? static_cast<double>(part) / static_cast<double>(whole) : 0;
}

}  // namespace

double DetectionCounts::precision() const { return ratio(matched, found); }
double DetectionCounts::recall() const { return ratio(matched, wanted); }
double DetectionCounts::hmean() const {
  const double p = precision(), r = recall();
  return p + r > 0 ? 2 * p * r / (p + r) : 0;
}

TextMatcher::TextMatcher(std::span<const TextRegion> regions, std::span<const FoundText> boxes)
    : regions_(regions), boxes_(boxes) {
  std::vector<double> areas;
  for (const FoundText& b : boxes) areas.push_back(common_area(b.polygon, b.polygon));
  for (std::size_t r = 0; r < regions.size(); ++r) {
    // By the same rule as what they have in common, also where edges cross.
    const double area = common_area(regions[r].polygon, regions[r].polygon);
    for (std::size_t b = 0; b < boxes.size(); ++b) {
      const double common = common_area(regions[r].polygon, boxes[b].polygon);
      if (common <= 0) continue;
      const double joined = area + areas[b] - common;
      overlaps_.push_back(
          {r, b, joined > 0 ? common / joined : 0, areas[b] > 0 ? common / areas[b] : 0});
    }
  }
}

TextMatch TextMatcher::match(double least_score) const {
  TextMatch m;
  m.box_of.assign(regions_.size(), TextMatch::none);
  m.region_of.assign(boxes_.size(), TextMatch::none);
  for (std::size_t r = 0; r < regions_.size(); ++r)
    if (regions_[r].ignore) m.box_of[r] = TextMatch::ignored;
  for (std::size_t b = 0; b < boxes_.size(); ++b)
    if (boxes_[b].score < least_score) m.region_of[b] = TextMatch::left_out;
  for (const Overlap& o : overlaps_)
    if (regions_[o.region].ignore && m.region_of[o.box] == TextMatch::none &&
        o.share > least_ignored_share)
      m.region_of[o.box] = TextMatch::ignored;
  for (const Overlap& o : overlaps_) {
    if (o.iou <= least_iou || m.box_of[o.region] != TextMatch::none ||
        m.region_of[o.box] != TextMatch::none)
      continue;
    m.box_of[o.region] = static_cast<int>(o.box);
    m.region_of[o.box] = static_cast<int>(o.region);
    ++m.counts.matched;
  }
  m.counts.wanted =
      std::ranges::count_if(m.box_of, [](int box) { return box != TextMatch::ignored; });
  m.counts.found = std::ranges::count_if(m.region_of, [](int r) { return r >= TextMatch::none; });
  return m;
}

std::vector<FoundText> found_text(std::span<const float> probability, const ViewSize& view,
                                  ImageSize picture, const PostprocessDeck& deck) {
  std::vector<FoundText> found;
  if (probability.empty()) return found;
  const auto& [scaled, padded] = view;
  const double x = static_cast<double>(picture.width) / static_cast<double>(scaled.width);
  const double y = static_cast<double>(picture.height) / static_cast<double>(scaled.height);
  for (const TextBox& box : find_text_boxes(probability, padded.height, padded.width, deck)) {
    FoundText& f = found.emplace_back();
    f.score = static_cast<double>(box.score);
    for (std::size_t k = 0; k < 8; k += 2)
      f.polygon.push_back(
          {static_cast<double>(box.corners[k]) * x, static_cast<double>(box.corners[k + 1]) * y});
  }
  return found;
}

}  // namespace weft
