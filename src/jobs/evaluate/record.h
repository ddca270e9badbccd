// What the evaluations of all models have in common: pictures to look at, times, files of results.
#pragma once

#include <cstdint>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "config/deck.h"
#include "jobs/engine/list_job.h"

namespace weft {

// A file that shows an image, its labels and its prediction side by side.
struct EvaluationPicture {
  std::string name, file;  // of the image; in the folder of the results
};

// Of the start that evaluated the last images: how many, on how many ranks, in how many seconds.
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

// evaluate.data, or else data.path.
const std::string& evaluated_data(const Deck& deck);
// That data in the key of a result: a file or folder by its identity, others as they are named.
std::string data_identity(const Deck& deck);
ListSettings evaluation_settings(const Deck& deck);
// No result may replace the deck, what it names, or one of `pictures`.
void check_results(const Deck& deck, const std::vector<std::string>& pictures);
// Removes pictures and predictions of images that an earlier evaluation in this folder had, and
// this one has not.
void remove_others(const ListEngine& engine);

// Seconds and picture of an item's line.
void add_line(EvaluationRecord& record, const nlohmann::ordered_json& line,
              const std::string& name);
// The pace of this start, or, if it evaluated nothing, what evaluation.json tells of an earlier
// one.
void set_pace(EvaluationRecord& record, const ListReport& report);
// Facts that every evaluation ends with.
void add_machine(EvaluationRecord& record, const Deck& deck);
// Writes evaluation.json, .txt and, unless `page` is empty, .html, and prints the table.
void write_results(const EvaluationRecord& record, const nlohmann::ordered_json& json,
                   const std::string& table, const std::string& page);

}  // namespace weft
