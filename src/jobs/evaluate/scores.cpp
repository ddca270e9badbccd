#include "jobs/evaluate/scores.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "core/error.h"
#include "core/json.h"
#include "core/log.h"
#include "models/segmentation/classes.h"

namespace weft {

using Json = nlohmann::ordered_json;

double EvaluationRecord::seconds_at(double quantile) const {
  if (seconds.empty()) return 0;
  std::vector<double> sorted = seconds;
  std::ranges::sort(sorted);
  const double at = std::ceil(quantile * static_cast<double>(sorted.size()));
  return sorted[static_cast<std::size_t>(std::max(at, 1.0)) - 1];
}

void EvaluationRecord::put_times(Json& j) const {
  j["seconds_an_image"] = {{"median", seconds_at(0.5)}, {"p95", seconds_at(0.95)}};
  j["pace"] = {{"images", pace.images},
               {"ranks", pace.ranks},
               {"seconds", pace.seconds},
               {"images_a_second", pace.images_a_second()}};
  for (const auto& [name, value] : facts) j["facts"][name] = value;
}

void EvaluationRecord::put_pictures(Json& j) const {
  j["pictures"] = Json::array();
  for (const EvaluationPicture& p : pictures)
    j["pictures"].push_back({{"name", p.name}, {"file", p.file}});
}

std::string EvaluationRecord::seconds_line() const {
  return fmt::format("{:.1f} ms an image (median; 95 %: {:.1f} ms)\n", 1e3 * seconds_at(0.5),
                     1e3 * seconds_at(0.95));
}

// ---- Classes of pixels ----

namespace {

double smoothed_ratio(std::int64_t part, std::int64_t whole) {
  return static_cast<double>(part) / (static_cast<double>(whole) + 1e-10);
}

}  // namespace

double ClassScore::iou() const { return smoothed_ratio(intersection, joined()); }

SegmentationScores::SegmentationScores(const std::vector<std::string>& class_names)
    : palette(label_palette(std::ssize(class_names))) {
  for (const std::string& name : class_names) classes.push_back({.name = name});
}

void SegmentationScores::add(std::span<const std::int64_t> counts) {
  const std::size_t C = classes.size();
  WEFT_ASSERT(counts.size() == 3 * C);
  for (std::size_t c = 0; c < C; ++c) {
    classes[c].intersection += counts[c];
    classes[c].predicted += counts[C + c];
    classes[c].labelled += counts[2 * C + c];
    correct += counts[c];
    pixels += counts[2 * C + c];
  }
  ++images;
}

double SegmentationScores::accuracy() const {
  return pixels > 0 ? static_cast<double>(correct) / static_cast<double>(pixels) : 0;
}

double SegmentationScores::mean_iou() const {
  double sum = 0;
  for (const ClassScore& c : classes) sum += c.iou();
  return classes.empty() ? 0 : sum / static_cast<double>(classes.size());
}

std::int64_t SegmentationScores::known() const {
  return std::ranges::count_if(classes, [](const ClassScore& c) { return c.labelled > 0; });
}

double SegmentationScores::mean_iou_of_known() const {
  double sum = 0;
  for (const ClassScore& c : classes) sum += c.labelled > 0 ? c.iou() : 0;
  return known() > 0 ? sum / static_cast<double>(known()) : 0;
}

std::vector<std::size_t> SegmentationScores::by_iou() const {
  std::vector<std::size_t> order(classes.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::ranges::stable_sort(order, [&](std::size_t a, std::size_t b) {
    const ClassScore &x = classes[a], &y = classes[b];
    return std::pair(x.labelled > 0, x.iou()) > std::pair(y.labelled > 0, y.iou());
  });
  return order;
}

Json SegmentationScores::json() const {
  Json j = {{"images", images},           {"pixels", pixels},
            {"correct", correct},         {"accuracy", accuracy()},
            {"mean_iou", mean_iou()},     {"mean_iou_of_labelled_classes", mean_iou_of_known()},
            {"labelled_classes", known()}};
  put_times(j);
  j["classes"] = Json::array();
  for (std::size_t c = 0; c < classes.size(); ++c) {
    const ClassScore& s = classes[c];
    j["classes"].push_back({{"class", c},
                            {"name", s.name},
                            {"iou", s.iou()},
                            {"intersection", s.intersection},
                            {"union", s.joined()},
                            {"predicted", s.predicted},
                            {"labelled", s.labelled}});
  }
  put_pictures(j);
  return j;
}

std::string SegmentationScores::table() const {
  std::string t = fmt::format("{:>5}  {:<32} {:>8} {:>14} {:>14}\n", "class", "name", "IoU %",
                              "labelled", "predicted");
  std::int64_t absent = 0;
  for (const std::size_t c : by_iou()) {
    const ClassScore& s = classes[c];
    if (s.joined() == 0)
      ++absent;
    else
      t += fmt::format("{:>5}  {:<32} {:>8.2f} {:>14} {:>14}\n", c, printable(s.name),
                       100 * s.iou(), s.labelled, s.predicted);
  }
  if (absent > 0)
    t += fmt::format("neither labelled nor predicted: {}\n", counted(absent, "class", "classes"));
  t += fmt::format("mean IoU {:.2f} % over {} classes, {:.2f} % over the {} that are labelled\n",
                   100 * mean_iou(), classes.size(), 100 * mean_iou_of_known(), known());
  t += fmt::format("pixel accuracy {:.2f} % of {} labelled pixels, {}\n", 100 * accuracy(), pixels,
                   counted(images, "image"));
  return t + seconds_line();
}

void put_counts(Json& line, std::span<const std::int64_t> counts) {
  const std::size_t C = counts.size() / 3;
  std::vector<std::size_t> which;
  std::vector<std::int64_t> right, predicted, labelled;
  for (std::size_t c = 0; c < C; ++c) {
    if (counts[C + c] == 0 && counts[2 * C + c] == 0) continue;
    which.push_back(c);
    right.push_back(counts[c]);
    predicted.push_back(counts[C + c]);
    labelled.push_back(counts[2 * C + c]);
  }
  line["pixels"] = std::accumulate(labelled.begin(), labelled.end(), std::int64_t{0});
  line["correct"] = std::accumulate(right.begin(), right.end(), std::int64_t{0});
  line["classes"] = which;
  line["intersection"] = right;
  line["predicted"] = predicted;
  line["labelled"] = labelled;
}

std::vector<std::int64_t> get_counts(const Json& line, std::int64_t classes) {
  std::vector<std::int64_t> counts(3 * classes);
  const Json& which = line.at("classes");
  std::int64_t row = 0;
  for (const char* kind : {"intersection", "predicted", "labelled"}) {
    for (std::size_t i = 0; i < which.size(); ++i) {
      const auto c = whole_number<std::int64_t>(which[i]);
      WEFT_CHECK(c >= 0 && c < classes, Exit::data, "remove the folder of the results",
                 "a line of the results counts class {} of {}", c, classes);
      counts[row * classes + c] = whole_number<std::int64_t>(line.at(kind).at(i));
    }
    ++row;
  }
  return counts;
}

// ---- Text ----

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
