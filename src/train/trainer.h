// The training state and its step: from clips to updated weights on every rank. jobs/train.cpp has
// the sequence of the job.
#pragma once

#include <mpi.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/checkpoint.h"
#include "data/prefetch.h"
#include "nn/exchange.h"
#include "parallel/communicator.h"
#include "parallel/rank_device.h"
#include "tensor/tensor.h"
#include "train/cost_table.h"
#include "train/data_parallel.h"
#include "train/memory_plan.h"
#include "train/metrics/metrics.h"
#include "train/metrics/step_report.h"
#include "train/metrics/watches.h"
#include "train/step_device.h"
#include "train/stop.h"
#include "train/task.h"

namespace weft {

class Trainer {
 public:
  // Collective. Opens the data, checks that it fits the model, and that the run directory can be
  // written and belongs to no other job.
  Trainer(const Deck& deck, const TaskFactory& make_task, MPI_Comm world);

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

  // Collective. Starts a save of the state; its stall is counted in the last step. Waits for a save
  // in flight.
  void save();
  // As save(), for train.checkpoint_every: with train.skip_saves it only logs a WARN line while
  // some rank is still writing the save before. All ranks decide alike, from the report of the
  // newest step that has ended.
  void save_if_free();
  std::int64_t saves_skipped() const { return saves_.skipped; }
  // Collective. Waits for the save in flight; false if the newest one could not be written.
  bool wait_for_save();

  // After an error: the destructor may still finish a save, which is no hang.
  void about_to_end() { comm_->progress(done_, "save"); }

  std::int64_t steps_done() const { return done_; }  // issued, on a GPU
  bool saved() const { return saves_.newest == done_; }
  // Rank 0's: train/metrics/run_facts.h.
  const std::string& run_id() const { return run_id_; }
  // Where its weights come from: files, a checkpoint, or random numbers.
  const std::string& started_from() const { return started_from_; }
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
  const Arena& arena() const { return *arena_; }
  const Communicator& communicator() const { return *comm_; }
  // Of all collectives, also of those within micro-batches (sync BN, sequence parallelism).
  double communication_seconds() const { return comm_->busy_seconds() + task_->blocked_seconds(); }
  const OptimizerState& state() const { return data_parallel_->state(); }
  const StepGraphs& graphs() const { return *graphs_; }
  // Checksums of this rank's weights, to compare runs and ranks.
  std::vector<double> weights_checksum();

 private:
  using Work = std::vector<std::pair<int, MicroBatch>>;
  // Seconds of a micro-batch, between marks of the device's progress on a GPU.
  struct Timed {
    int bucket;
    double share;  // of the bucket's full cost
    double seconds;
    DeviceEvent begin, end;
  };
  // An issued step: its metrics as far as the host knows them, and marks of the device's progress.
  struct Issued {
    StepMetrics metrics;
    StepReport::Rows rows;
    // [rank]: the work that the plan gave each, in this step and in the one whose busy times this
    // step reports.
    std::vector<double> expected, expected_of_busy;
    std::vector<Timed> micro_batches;
    std::span<const double> cost_sums;  // of all ranks, in a step after which costs are agreed
    bool compare_weights = false;
    // Seconds that this rank was blocked: between the end of its backward and the last sum; before
    // that; after that.
    double blocked = 0, blocked_in_compute = 0, blocked_for_norm = 0;
    DeviceEvent begin, computed, reduced, updated;
  };

  // What micro-batches cost, as all ranks agree.
  struct Costs {
    std::unique_ptr<CostTable> table;
    std::string saved;  // of the checkpoint
    Tensor sums;        // f64 [2 buckets], to be summed over ranks
    std::unique_ptr<HostCopy> host_sums;
  };
  struct Watches {
    std::unique_ptr<StragglerWatch> stragglers;
    SpikeWatch loss, grad_norm;
  };
  struct Saves {
    std::int64_t newest = -1;  // steps of the newest one
    bool writing = false;      // on some rank, as all know
    std::int64_t skipped = 0;
    double stall = 0;  // seconds of the newest one
  };
  // How fast steps go.
  struct Pace {
    double busy = 0, data_wait = 0;      // seconds of the newest step that has ended, on a GPU
    std::vector<double> expected;        // [rank], of the same
    std::vector<double> recent_seconds;  // of steps
    double blocked = 0;                  // seconds in exchanges that are already counted
  };

  void choose_groups();
  double take_blocked();
  void open_data();
  std::string data_text() const;
  void warn_of_other_data(const Checkpoint& checkpoint) const;
  void check_state_fits();
  void load_state();
  void plan_step();
  void open_readers();

  Work my_work(const std::vector<MicroBatch>& plan, const std::vector<int>& owner) const;
  std::vector<int> owners(const std::vector<MicroBatch>& plan, std::int64_t step) const;
  CostTable::Planned planned_cost(int bucket) const;
  double share_of(const MicroBatch& clips, std::int64_t step) const;

  void run_micro_batch(const LoadedBatch& clips, bool first, bool last, float weight);
  void count_loss(const TrainingLoss& loss);
  unsigned look_at_requests();
  void begin_faults();
  void end_faults(double compute_seconds);
  void checksum_weights();
  Communicator::Ticket agree_on_costs();

  void complete(Issued step);
  void look_at_ranks(Issued& step);
  void look_for_spikes(const StepMetrics& m);
  void compare_weights(const Issued& step) const;
  [[noreturn]] void explain_non_finite(const Issued& step);
  std::string find_non_finite(std::int64_t step, float weight);
  void watch_time(double seconds);
  void set_timeout(double seconds);
  std::string name_of_rank(int rank) const;

  Deck deck_;
  MPI_Comm world_;
  RankDevice device_;
  // Outlives the communicators, which may hold tensors of it until they end.
  std::unique_ptr<Arena> arena_;
  std::unique_ptr<Communicator> comm_;
  std::unique_ptr<Communicator>
      sequence_;                // the ranks that share this one's clips; null without parallel.sp
  int group_ = 0, groups_ = 1;  // of ranks that share clips
  bool lockstep_ = false;       // TrainingTask::lockstep_ranks
  std::vector<std::string> hosts_;  // [rank]
  int threads_;
  std::unique_ptr<ClipSource> source_;
  std::string data_id_;  // its content_id()
  std::unique_ptr<TrainingTask> task_;
  std::vector<TrainDeck> optimizers_;  // [group of parameters]
  std::unique_ptr<CheckpointWriter> checkpoints_;
  std::unique_ptr<StepGraphs> graphs_;
  std::unique_ptr<DataParallel> data_parallel_;
  std::unique_ptr<StepReport> report_;
  std::unique_ptr<ClipStaging> staging_;
  std::vector<std::int64_t> batch_sizes_;  // [bucket]
  std::vector<StepMemory> memory_;         // [bucket]
  Costs costs_;
  std::string run_id_;  // on rank 0
  std::string started_from_;
  std::unique_ptr<StepPlan> planner_;
  std::unique_ptr<Prefetcher> prefetcher_;
  Watches watches_;
  Requests requests_;
  unsigned requested_ = 0;
  std::int64_t done_ = 0;  // steps
  Saves saves_;
  Pace pace_;
  std::optional<Issued> under_way_;
  DeviceEvent last_update_;  // of the step before the one under way
  std::vector<StepMetrics> finished_;
};

}  // namespace weft
