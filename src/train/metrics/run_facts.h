// Log output of a training run: the start table, a line per step, the end table, and RUN/run.json.
#pragma once

#include <mpi.h>

#include <array>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "core/progress.h"
#include "train/trainer.h"

namespace weft {

// A run's id tells it from others: "id" of RUN/run.json and a note of each checkpoint. It goes with
// the run directory, wherever that is moved. "" where run.json is not there, is damaged or of an
// older weft.
std::string stored_run_id(const std::filesystem::path& run_dir);
// N of the train.steps = "+N" that the last start was asked for, and the step that it was to reach;
// 0 where it was not.
std::pair<std::int64_t, std::int64_t> stored_more_steps(const std::filesystem::path& run_dir);
// 32 hexadecimal digits that no other run has.
std::string new_run_id();

// Sums over the steps of a run, of which the first tenth can be left out, when their caches are
// cold and their memory is new. Takes as little memory for a million steps as for a hundred.
class StepSums {
 public:
  enum Of {
    seconds,
    samples,
    flops,
    compute,
    data_wait,
    comm_exposed,
    wait_slowest,
    optimizer,
    checkpoint,
    count
  };
  using Values = std::array<double, count>;

  void add(const Values& step);
  // Without the first tenth of the steps, or a little less of them; the number of those left out.
  std::pair<Values, std::int64_t> without_first_tenth() const;
  std::int64_t steps() const { return steps_; }

 private:
  static constexpr std::size_t most = 128;  // spans, an even number
  std::vector<Values> spans_;               // each of so many steps, the last perhaps of fewer
  std::int64_t span_ = 1, steps_ = 0;
};

class RunFacts {
 public:
  RunFacts(const Deck& deck, Trainer& trainer);

  void print() const;
  // RUN/deck.toml (the effective deck) and RUN/run.json (the start table).
  void write(const std::filesystem::path& run_dir) const;

  void count(const StepMetrics& m);
  // `left`: ", 3 min 20 s left", or "".
  void print_step(const StepMetrics& m, const std::string& left) const;
  // Achieved against predicted, who was slow, and every warning once more.
  void print_end(const Trainer& trainer) const;
  // Collective, over the communicator of all ranks, once all steps have ended. What they made and
  // where their time went; on rank 0. No items where there were no steps.
  JobWork work(Trainer& trainer, MPI_Comm world) const;

 private:
  const Deck& deck_;
  std::vector<std::pair<std::string, std::string>> rows_;
  std::string id_;  // of the run
  // The plan of a rank's memory in bytes by kind, in the order of the table.
  std::vector<std::pair<std::string, std::size_t>> memory_;
  std::vector<double> seconds_;
  std::vector<std::int64_t> slowest_;  // [rank] steps in which it was the slowest
  StepSums sums_;                      // of this rank
  double total_spread_ = 0;
};

}  // namespace weft
