// The training state and its step: from clips to updated weights on every rank. commands/train.cpp tells the story of the job.
#pragma once

#include <mpi.h>

#include <memory>
#include <optional>
#include <vector>

#include "core/arena.h"
#include "data/prefetch.h"
#include "models/stdit3.h"
#include "observe/metrics.h"
#include "parallel/communicator.h"
#include "parallel/rank_device.h"
#include "train/checkpoint.h"
#include "train/clip_staging.h"
#include "train/optimizer.h"
#include "train/step_graphs.h"
#include "train/text_features.h"

namespace weft {

class Trainer {
 public:
  // Collective. Opens the data, checks that it fits the model, and makes sure that the run directory can be
  // written and is no other job's.
  Trainer(const Deck& deck, MPI_Comm world);

  // Collective. Weights and optimizer, new or from the newest checkpoint; the memory plan; the readers.
  void start();

  // One step: forward, backward, reduction, update. Collective, without a barrier. On a GPU the step is issued, and the
  // host waits for the one before it. Exit::non_finite leaves the weights as they were.
  void step();
  // Metrics of the steps that have ended since the last call; with `all`, waits for the one under way.
  std::vector<StepMetrics> finished(bool all = false);

  // Collective. Starts a save of the state; its stall counts to the last step.
  void save();
  // Collective. Waits for the save in flight; false if the newest one could not be written.
  bool wait_for_save();

  std::int64_t steps_done() const { return done_; }  // issued, on a GPU
  bool saved() const { return saved_ == done_; }
  // Some rank was asked to stop before the end of a step that has ended: all ranks agree.
  bool stop_requested() const { return stop_; }

  bool first_rank() const { return comm_->rank() == 0; }
  int ranks() const { return comm_->size(); }
  int threads() const { return threads_; }
  Stdit3& model() { return model_; }
  const ClipSource& source() const { return *source_; }
  std::size_t planned_bytes() const { return planned_bytes_; }
  Arena& arena() { return *arena_; }
  const Communicator& communicator() const { return *comm_; }
  const StepGraphs& graphs() const { return *graphs_; }

 private:
  // A step that was issued: its metrics as far as the host knows them, and marks of the device's progress.
  struct Issued {
    StepMetrics metrics;
    DeviceEvent begin, computed, reduced, updated;
    const double* results = nullptr;  // loss sum, ranks that want to stop, squared gradient norm
  };

  void run_micro_batch(const LoadedBatch& clips, bool first, bool last, float weight);
  void reduce(int bucket);   // starts the reduction of a bucket of gradients
  double join_reductions();  // seconds that the host was blocked
  void complete(Issued step);

  std::vector<std::pair<int, MicroBatch>> my_work(const std::vector<MicroBatch>& plan) const;
  double cost(const MicroBatch& m) const;

  Deck deck_;
  MPI_Comm world_;
  RankDevice device_;
  std::unique_ptr<Communicator> comm_;
  std::vector<Communicator::Ticket> tickets_;  // of the step's reductions
  int threads_;
  std::unique_ptr<ClipSource> source_;
  std::unique_ptr<TextFeatures> features_;
  Stdit3 model_;
  std::unique_ptr<CheckpointWriter> checkpoints_;
  std::unique_ptr<OptimizerState> optimizer_;
  Tensor results_;  // f64 [3], as Issued.results, on the device
  std::unique_ptr<double, void (*)(double*)> results_on_host_;  // two steps' worth, pinned on a GPU
  std::unique_ptr<Arena> arena_;
  std::unique_ptr<ClipStaging> staging_;
  std::unique_ptr<StepGraphs> graphs_;
  std::unique_ptr<StepPlanner> planner_;
  std::unique_ptr<Prefetcher> prefetcher_;
  std::int64_t done_ = 0;    // steps
  std::int64_t saved_ = -1;  // steps of the newest save
  bool stop_ = false;
  std::optional<Issued> under_way_;
  DeviceEvent last_update_;  // of the step before the one under way
  std::vector<StepMetrics> finished_;
  std::size_t planned_bytes_ = 0;
};

}  // namespace weft
