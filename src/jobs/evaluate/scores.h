// How well a model did: from counts of images to figures, tables and JSON
// (docs/models/segmentation.md and docs/models/dbnet.md, Evaluation).
#pragma once

#include <cstdint>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "media/writers.h"
#include "models/dbnet/text_match.h"

namespace weft {

// ---- What the evaluations of all models have in common ----

// A file that shows an image, its labels and its prediction side by side.
struct EvaluationPicture {
  std::string name, file;  // of the image; in the folder of the results
};

// The start that evaluated the last images: how many, on how many ranks, in how many seconds.
struct EvaluationPace {
  std::int64_t images = 0, ranks = 0;
  double seconds = 0;
  double images_a_second() const { return seconds > 0 ? static_cast<double>(images) / seconds : 0; }
};

struct EvaluationRecord {
  std::int64_t images = 0;
  std::vector<double> seconds;  // of each image: from pixels in host memory to the prediction
  std::vector<EvaluationPicture> pictures;
  std::filesystem::path folder;
  // What was evaluated and on what, for people: name and value.
  std::vector<std::pair<std::string, std::string>> facts;
  EvaluationPace pace;

  // The seconds that this share of the images does not exceed; 0 without images.
  double seconds_at(double quantile) const;
  // Members seconds_an_image, pace and facts; and pictures.
  void put_times(nlohmann::ordered_json& j) const;
  void put_pictures(nlohmann::ordered_json& j) const;
  std::string seconds_line() const;  // for a terminal
};

// ---- Classes of pixels ----

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

// ---- Text ----

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
