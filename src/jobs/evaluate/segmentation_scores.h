// How well predicted classes match labels, from counts of pixels
// (docs/models/segmentation.md, Evaluation).
#pragma once

#include <span>

#include "jobs/evaluate/record.h"
#include "media/writers.h"

namespace weft {

// Labelled pixels of one class over all images.
struct ClassScore {
  std::string name;
  std::int64_t intersection = 0;  // predicted rightly
  std::int64_t predicted = 0, labelled = 0;
  std::int64_t joined() const { return predicted + labelled - intersection; }
  double iou() const;
};

struct SegmentationScores : EvaluationRecord {
  std::vector<ClassScore> classes;
  std::vector<Rgb> palette;              // by label, as in the pictures
  std::int64_t pixels = 0, correct = 0;  // labelled ones

  explicit SegmentationScores(const std::vector<std::string>& class_names);

  // counts [3, classes]: right, predicted, labelled pixels of one image.
  void add(std::span<const std::int64_t> counts);

  double accuracy() const;           // of the labelled pixels
  double mean_iou() const;           // over all classes; those that do not occur count as 0
  double mean_iou_of_known() const;  // over the classes that are labelled somewhere
  std::int64_t known() const;        // how many these are
  // Classes from the best IoU to the worst; first those that are labelled somewhere.
  std::vector<std::size_t> by_iou() const;

  nlohmann::ordered_json json() const;
  std::string table() const;  // for a terminal
};

// One image's counts as members of a line, classes that do not occur left out; and back.
void put_counts(nlohmann::ordered_json& line, std::span<const std::int64_t> counts);
std::vector<std::int64_t> get_counts(const nlohmann::ordered_json& line, std::int64_t classes);

}  // namespace weft
