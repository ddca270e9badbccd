// What follows a step: its figures from the reports of all ranks, and the verdicts on them: steps
// that are not finite, weights that differ, losses that spike, ranks that are slow. All ranks see
// the same figures and decide alike. Faults that tests inject are here too.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <vector>

#include "tensor/device.h"
#include "train/data_parallel.h"
#include "train/metrics/metrics.h"
#include "train/metrics/step_report.h"
#include "train/step_work.h"
#include "train/task.h"

namespace weft {

// A step that has been issued: its metrics as far as the host knows them, and marks of the device's
// progress.
struct IssuedStep {
  // A micro-batch's time: seconds, on a GPU between two marks.
  struct MicroBatchTime {
    int bucket = 0;
    double share = 1;  // of the bucket's full cost
    double seconds = 0;
    DeviceEvent begin = {}, end = {};
  };
  StepMetrics metrics;
  StepReport::Rows rows;
  // [rank]: the work that the plan gave each, in this step and in the one whose busy times this
  // step reports.
  std::vector<double> expected, expected_of_busy;
  std::vector<MicroBatchTime> micro_batches;
  std::span<const double> cost_sums;      // of all ranks, in a step after which costs are agreed
  std::span<const double> layer_squares;  // [layer], in a step of train.layer_norms_every
  bool compare_weights = false;
  // Seconds that this rank was blocked: between the end of its backward and the last sum; before
  // that; after that.
  double blocked = 0, blocked_in_compute = 0, blocked_for_norm = 0;
  DeviceEvent begin, computed, reduced, updated;
};

class StepReview {
 public:
  // `hosts` [rank].
  StepReview(const Deck& deck, TrainingTask& task, int rank, std::vector<std::string> hosts);

  // Fills the step's loss, its terms and the gradient's norm from the rows.
  void sum_up(IssuedStep& step) const;
  // Verdicts on a finite step, and the table of who was busy and who waited. Exit::hardware: the
  // weights of the ranks differ. Exit::non_finite: a spike, if train.loss_spike says stop; the step
  // has changed the weights, but no checkpoint contains it yet.
  void judge(IssuedStep& step);

  // Notes how long a step took. Returns the seconds without progress that count as a hang from now
  // on, once enough steps are known.
  std::optional<double> hang_timeout(double step_seconds);
  double longest_step() const;  // of the last steps; 0: none yet

  // Throws the error for a step that is not finite, after it was run again. `found`: what
  // find_non_finite() returned on all ranks, one after the other.
  [[noreturn]] void throw_non_finite(const IssuedStep& step, const std::string& found) const;
  std::string rank_name(int rank) const;  // "rank 3 on node07"

 private:
  void compare_weights(const IssuedStep& step) const;
  void look_for_spikes(const StepMetrics& m);
  void look_for_stragglers(IssuedStep& step);

  const Deck& deck_;
  TrainingTask& task_;
  int rank_;
  std::vector<std::string> hosts_;
  StragglerWatch stragglers_;
  SpikeWatch loss_, grad_norm_;
  std::vector<double> recent_seconds_;  // of steps
};

// Checksums of the weights that every rank holds, into its report: all in f32, or the bf16 copies
// and those that a bf16 model reads in f32.
void checksum_weights(ParameterTable& table, StepReport& report);

// Runs this rank's micro-batches of a step again, one by one. Returns a line for each whose
// gradient or loss is not finite, beginning with a line break. The backward goes from the last
// layer to the first, so the last layer with a fault is where it entered: that one is named.
std::string find_non_finite(const WorkPlan::Work& work, std::int64_t step, float weight,
                            ParameterTable& table, DataParallel& data_parallel,
                            MicroBatchRunner& runner, const std::string& rank_name);

}  // namespace weft
