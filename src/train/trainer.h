// The training state and its step: from clips to updated weights on every rank. jobs/train.cpp has
// the sequence of the job; the step's parts are in step_work.h (this rank's micro-batches),
// data_parallel.h (gradients, optimizer, weights) and step_review.h (figures and verdicts).
#pragma once

#include <mpi.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/checkpoint.h"
#include "data/held_out.h"
#include "data/prefetch.h"
#include "nn/exchange.h"
#include "parallel/communicator.h"
#include "parallel/rank_device.h"
#include "tensor/tensor.h"
#include "train/data_parallel.h"
#include "train/layer_norms.h"
#include "train/memory_plan.h"
#include "train/metrics/metrics.h"
#include "train/metrics/step_report.h"
#include "train/step_review.h"
#include "train/step_work.h"
#include "train/stop.h"
#include "train/task.h"

namespace weft {

// What encoded the captions that a training reads (data/clip_store.h, encoder_in); "": not known.
std::string encoder_of_captions(const DataDeck& data);

class Trainer {
 public:
  // Collective. Opens the data, checks that it fits the model, and that the run directory can be
  // written and belongs to no other job.
  Trainer(const Deck& deck, const TaskFactory& make_task, MPI_Comm world);

  // Before start(), on one rank: every step takes the same micro-batch, which is loaded once. It is
  // the first of the bucket whose micro-batches cost most. train.micro_batches is 1, and nothing is
  // saved.
  void repeat_costliest() { repeats_ = true; }

  // Collective. Weights and optimizer, new or from the newest checkpoint; the memory plan; the
  // readers.
  void start();

  // One step: forward, backward, reduction, update. Collective, without a barrier. On a GPU it
  // issues the step and waits for the one before. Exit::non_finite and Exit::hardware leave the
  // weights as they were.
  void step();
  // Metrics of the steps that have ended since the last call; with `all`, waits for the one under
  // way.
  std::vector<StepMetrics> finished(bool all = false);

  // Before start(): the arena must also hold what forward_only() will run. `plan` gives that in
  // bytes, or throws Exit::usage where an arena of `capacity` bytes is too small.
  void plan_also(std::function<std::size_t(std::size_t capacity)> plan) {
    also_.push_back(std::move(plan));
  }
  // Collective. Ends the step under way, then runs `work`, which runs the model forward alone, with
  // all weights there and in the trainer's arena: training goes on with the same bits. `phase` is
  // for the watchdog.
  void forward_only(Phase phase, const std::function<void()>& work);
  // Within it: this rank runs no forward any more. To be called by all ranks before `work` lets
  // them communicate.
  void forwards_done() { data_parallel_->end_passes(); }
  // What the deck holds out of the data for validation.
  const HeldOut& held_out() const { return held_out_; }
  Communicator& communicator() { return *comm_; }
  const WorkPlan::Groups& groups() const { return groups_; }
  // A text that goes with every checkpoint: ValidationHistory.
  const std::string& validation_note() const { return validation_note_; }
  void set_validation_note(std::string text) { validation_note_ = std::move(text); }

  // Collective. Starts a save of the state; its stall is counted in the next step. Waits for a save
  // in flight. `best`: as CheckpointWriter::save.
  void save(bool best = false);
  // As save(), for train.checkpoint_every: with train.skip_saves it only logs a WARN line while
  // some rank is still writing the save before. All ranks decide alike, from the report of the
  // newest step that has ended.
  void save_if_free();
  // What each save calls before there is a checkpoint: the steps until it are finished().
  void before_saves(std::function<void()> act) { before_saves_ = std::move(act); }
  std::int64_t saves_skipped() const { return saves_.skipped; }
  // Collective. Waits for the save in flight; false if the newest one could not be written.
  bool wait_for_save();

  // After an error: the destructor may still finish a save, which is no hang.
  void about_to_end() { comm_->progress(done_, Phase::save); }

  std::int64_t steps_done() const { return done_; }  // issued, on a GPU
  bool saved() const { return saves_.newest == done_; }
  // Rank 0's: train/metrics/run_facts.h.
  const std::string& run_id() const { return run_id_; }
  // Where its weights come from: files, a checkpoint, or random numbers.
  const std::string& started_from() const { return started_from_; }
  // On a GPU, which ways of computing the run takes (ops/ways.h); of rank 0.
  const std::string& ways() const { return ways_; }
  // With repeat_costliest(): that micro-batch.
  const LoadedBatch& repeated() const { return *repeated_; }
  // Requests to any rank, as reported with the steps that have ended (bits of train/stop.h): the
  // same on all ranks. Each request is returned once, except `stop`, which stays.
  unsigned take_requests();

  bool first_rank() const { return comm_->rank() == 0; }
  int threads() const { return threads_; }
  TrainingTask& task() { return *task_; }
  ParameterTable& params() { return task_->params(); }
  const ClipSource& source() const { return *source_; }
  const std::vector<StepMemory>& memory() const { return memory_; }  // [bucket]
  std::size_t planned_bytes() const;                                 // of the largest
  Arena& arena() const { return *arena_; }
  const Communicator& communicator() const { return *comm_; }
  const OptimizerState& state() const { return data_parallel_->state(); }
  const StepGraphs& graphs() const { return *graphs_; }
  // Checksums of this rank's weights, to compare runs and ranks.
  std::vector<double> weights_checksum();

 private:
  // start()
  void choose_groups();
  std::optional<Sharding> sharding();
  void open_data();
  void check_state_fits();
  void load_state();
  std::string data_text() const;
  void check_data(const std::string& checkpoint) const;
  void plan_step();
  void try_each_bucket();
  void open_readers();
  void load_costliest();

  // step()
  void compute(const WorkPlan::Work& work, std::size_t most, IssuedStep& step);
  void count_loss(const TrainingLoss& loss);
  double take_blocked();
  unsigned look_at_requests(double this_step);  // its seconds so far

  // What is done about a step that has been issued.
  void complete(IssuedStep step);
  void read_device_times(IssuedStep& step);
  void hear_requests(const IssuedStep& step);
  [[noreturn]] void explain_non_finite(const IssuedStep& step);
  void set_timeout(double seconds);

  // What the run is made of. The arena outlives the communicators, which may hold tensors of it
  // until they end.
  Deck deck_;
  MPI_Comm world_;
  RankDevice device_;
  std::unique_ptr<Arena> arena_;
  std::unique_ptr<Communicator> comm_;
  std::unique_ptr<Communicator> sequence_;  // ranks that share this one's clips; null without sp
  WorkPlan::Groups groups_;
  int threads_;
  std::unique_ptr<ClipSource> source_;
  HeldOut held_out_;
  std::string data_id_;  // its content_id()
  std::string text_encoder_, class_names_;
  std::unique_ptr<TrainingTask> task_;
  StepReview review_;
  std::vector<TrainDeck> optimizers_;      // [group of parameters]
  std::vector<std::int64_t> batch_sizes_;  // [bucket]
  std::vector<StepMemory> memory_;         // [bucket]
  std::vector<double> flops_;              // [bucket] of a micro-batch, on this rank
  std::vector<std::function<std::size_t(std::size_t)>> also_;
  std::size_t also_bytes_ = 0;  // of the largest of these
  std::string validation_note_;
  std::string run_id_;  // on rank 0
  std::string started_from_, ways_;
  RunNotes saved_;  // of the checkpoint that it goes on from

  // The parts of a step, made by start().
  std::unique_ptr<StepGraphs> graphs_;
  std::unique_ptr<DataParallel> data_parallel_;
  std::unique_ptr<StepReport> report_;
  std::unique_ptr<StoreLosses> store_losses_;
  std::unique_ptr<LayerNorms> layer_norms_;  // null without train.layer_norms_every
  std::unique_ptr<MicroBatchRunner> runner_;
  std::unique_ptr<WorkPlan> work_;
  std::unique_ptr<Prefetcher> prefetcher_;
  bool repeats_ = false;
  std::optional<LoadedBatch> repeated_;  // its bytes are the prefetcher's
  Requests requests_;
  unsigned requested_ = 0;
  std::function<void()> before_saves_;

  std::unique_ptr<CheckpointWriter> checkpoints_;
  struct Saves {
    std::int64_t newest = -1;  // steps of the newest one
    bool writing = false;      // on some rank, as all know
    std::int64_t skipped = 0;
    double stall = 0;      // seconds of the newest one
    double uncounted = 0;  // of stalls, in no step's metrics
  } saves_;

  std::int64_t done_ = 0;     // steps
  double blocked_ = 0;        // seconds in exchanges that are already counted
  double longest_aside_ = 0;  // seconds of the longest forward_only()
  // On a GPU the host is a step behind.
  std::optional<IssuedStep> under_way_;
  struct Ended {
    double busy = 0, data_wait = 0;  // seconds
    std::vector<double> expected;    // [rank]
    DeviceEvent update;
  } ended_;  // the newest step that has ended
  std::vector<StepMetrics> finished_;
};

}  // namespace weft
