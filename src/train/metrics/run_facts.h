// Log output of a training run: the start table, a line per step, the end table, and RUN/run.json.
#pragma once

#include <filesystem>
#include <string>

#include "train/trainer.h"

namespace weft {

// A run's id tells it from others: "id" of RUN/run.json and a note of each checkpoint. It goes with
// the run directory, wherever that is moved. "" where run.json is not there, is damaged or of an
// older weft.
std::string stored_run_id(const std::filesystem::path& run_dir);
// 32 hexadecimal digits that no other run has.
std::string new_run_id();

class RunFacts {
 public:
  RunFacts(const Deck& deck, Trainer& trainer);

  void print() const;
  // RUN/deck.toml (the effective deck) and RUN/run.json (the start table).
  void write(const std::filesystem::path& run_dir) const;

  void count(const StepMetrics& m);
  // `left`: ", 3 min 20 s left", or "".
  void print_step(const StepMetrics& m, const std::string& left) const;
  // Achieved against predicted, where the time went and on whom it was waited for, and every
  // warning once more.
  void print_end(const Trainer& trainer) const;

 private:
  const Deck& deck_;
  std::vector<std::pair<std::string, std::string>> rows_;
  std::string id_;  // of the run
  // The plan of a rank's memory in bytes by kind, in the order of the table.
  std::vector<std::pair<std::string, std::size_t>> memory_;
  std::vector<double> seconds_;
  std::vector<std::int64_t> slowest_;  // [rank] steps in which it was the slowest
  std::vector<double> waits_;          // [rank] seconds of waiting for the slowest
  StepSplit total_;                    // data_wait, compute and wait_slowest: means of the ranks
  double total_seconds_ = 0, total_spread_ = 0;
};

}  // namespace weft
