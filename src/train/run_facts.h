// What a training run says of itself: the start table, a line a step, the end table, RUN/run.json.
#pragma once

#include <filesystem>

#include "data/clip_source.h"
#include "models/stdit3.h"
#include "observe/metrics.h"
#include "parallel/communicator.h"

namespace weft {

class RunFacts {
 public:
  RunFacts(const Deck& deck, Stdit3& model, const ClipSource& source, const Communicator& comm,
           int threads, std::size_t planned_bytes);

  void print() const;
  // RUN/deck.toml (the effective deck) and RUN/run.json (the start table).
  void write(const std::filesystem::path& run_dir) const;

  void count(const StepMetrics& m);
  void print_step(const StepMetrics& m) const;
  // Achieved against predicted, where the time went, and every warning once more.
  void print_end(std::size_t arena_peak, double comm_busy) const;

 private:
  const Deck& deck_;
  std::vector<std::pair<std::string, std::string>> rows_;
  std::size_t planned_bytes_;
  double state_bytes_;
  std::vector<double> seconds_;
  StepSplit total_;
  double total_seconds_ = 0;
};

}  // namespace weft
