#include "jobs/evaluate/detection_scores.h"

#include <algorithm>

#include "core/error.h"
#include "core/json.h"
#include "core/log.h"
#include "models/dbnet/boxes.h"

namespace weft {

using Json = nlohmann::ordered_json;

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

std::vector<double> score_thresholds(double least) {
  std::vector<double> all = {least};
  for (int tenth = 1; tenth < 10; ++tenth)
    if (tenth / 10.0 > least + 1e-6) all.push_back(tenth / 10.0);
  return all;
}

void put_matches(Json& line, const TextMatcher& matcher, std::span<const double> thresholds) {
  std::vector<std::int64_t> found, matched;
  for (const double threshold : thresholds) {
    const TextMatch m = matcher.match(threshold);
    found.push_back(m.counts.found);
    matched.push_back(m.counts.matched);
    line["wanted"] = m.counts.wanted;
    line["ignored"] = std::ranges::count(m.box_of, TextMatch::ignored);
  }
  line["thresholds"] = thresholds;
  line["found"] = found;
  line["matched"] = matched;
}

DetectionScores::DetectionScores(double least_score)
    : thresholds(score_thresholds(least_score)), counts(thresholds.size()) {}

void DetectionScores::add(const Json& line) {
  WEFT_CHECK(line.at("thresholds") == Json(thresholds) &&
                 line.at("found").size() == thresholds.size() &&
                 line.at("matched").size() == thresholds.size(),
             Exit::data, "remove the folder of the results",
             "a line of the results counts boxes at other scores");
  for (std::size_t t = 0; t < thresholds.size(); ++t) {
    counts[t].wanted += whole_number<std::int64_t>(line.at("wanted"));
    counts[t].found += whole_number<std::int64_t>(line.at("found")[t]);
    counts[t].matched += whole_number<std::int64_t>(line.at("matched")[t]);
  }
  ignored += whole_number<std::int64_t>(line.at("ignored"));
  ++images;
}

std::size_t DetectionScores::best() const {
  const auto at = std::ranges::max_element(
      counts, [](const auto& a, const auto& b) { return a.hmean() < b.hmean(); });
  return static_cast<std::size_t>(at - counts.begin());
}

Json DetectionScores::json() const {
  const DetectionCounts& c = counts.front();
  Json j = {{"images", images},
            {"regions", c.wanted},
            {"ignored_regions", ignored},
            {"boxes", c.found},
            {"matched", c.matched},
            {"precision", c.precision()},
            {"recall", c.recall()},
            {"hmean", c.hmean()},
            {"min_text_score", thresholds[0]},
            {"best_hmean", counts[best()].hmean()},
            {"best_score", thresholds[best()]}};
  put_times(j);
  j["scores"] = Json::array();
  for (std::size_t t = 0; t < thresholds.size(); ++t)
    j["scores"].push_back({{"score", thresholds[t]},
                           {"boxes", counts[t].found},
                           {"matched", counts[t].matched},
                           {"precision", counts[t].precision()},
                           {"recall", counts[t].recall()},
                           {"hmean", counts[t].hmean()}});
  put_pictures(j);
  return j;
}

std::string DetectionScores::table() const {
  std::string t = fmt::format("{:>8} {:>12} {:>10} {:>10} {:>10} {:>10}\n", "score", "precision %",
                              "recall %", "Hmean %", "boxes", "matched");
  for (std::size_t i = 0; i < thresholds.size(); ++i) {
    const DetectionCounts& c = counts[i];
    t += fmt::format("{:>8.2f} {:>12.2f} {:>10.2f} {:>10.2f} {:>10} {:>10}\n", thresholds[i],
                     100 * c.precision(), 100 * c.recall(), 100 * c.hmean(), c.found, c.matched);
  }
  const DetectionCounts& c = counts.front();
  t += fmt::format(
      "Hmean {:.2f} % (precision {:.2f} %, recall {:.2f} %) for boxes of score {} and "
      "more\n",
      100 * c.hmean(), 100 * c.precision(), 100 * c.recall(), thresholds.front());
  t += fmt::format("{} in {}, and {} ignored\n", counted(c.wanted, "region"),
                   counted(images, "image"), ignored);
  return t + seconds_line();
}

}  // namespace weft
