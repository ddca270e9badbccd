#include "jobs/evaluate/segmentation_scores.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "core/error.h"
#include "core/json.h"
#include "core/log.h"
#include "models/segmentation/palette.h"

namespace weft {

using Json = nlohmann::ordered_json;

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
  std::vector<std::int64_t> counts(static_cast<std::size_t>(3 * classes));
  const Json& which = line.at("classes");
  std::int64_t row = 0;
  for (const char* kind : {"intersection", "predicted", "labelled"}) {
    for (std::size_t i = 0; i < which.size(); ++i) {
      const auto c = whole_number<std::int64_t>(which[i]);
      WEFT_CHECK(c >= 0 && c < classes, Exit::data, "remove the folder of the results",
                 "a line of the results counts class {} of {}", c, classes);
      counts[static_cast<std::size_t>(row * classes + c)] =
          whole_number<std::int64_t>(line.at(kind).at(i));
    }
    ++row;
  }
  return counts;
}

}  // namespace weft
