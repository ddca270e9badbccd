// The model of a training run. The trainer (train/trainer.h) and the planner (plan/plan.h) know
// parameters, micro-batches and losses; the task knows the model behind them: what a step computes,
// what it costs, and which parts can be recomputed. A plan asks the same methods as a training, in
// an arena that only plans (train/step_cost.h).
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "config/deck.h"
#include "data/prefetch.h"
#include "nn/nn.h"
#include "nn/parameters.h"
#include "parallel/communicator.h"

namespace weft {

class StepReport;
class ValidationSet;
struct HeldOut;

struct TrainingLoss {
  Tensor clips;  // f32 [clips], the loss of each
  Tensor terms;  // f32 [terms of the task], what these are made of, summed over the clips;
                 // undefined where there are none
};

// A micro-batch, ready to be computed: its tensors are allocated and its random numbers drawn.
struct TrainingWork {
  // The gradient of weight * (sum of the part's losses) waits in the tape, or is in the table
  // already.
  using Part = std::function<TrainingLoss(Tape& tape)>;
  // Parts run one after the other, each with a backward of its own, so they need the memory of one.
  // Uses of parameters (nn/parameters.h) are counted in the last part only.
  std::vector<Part> parts;
  // What the work depends on besides the bucket (train/step_work.h), the weight too unless it is
  // read from memory; empty: never recorded.
  std::string key;
  // Bytes of activations that the tape of a part may keep beyond what it must (Tape::allow).
  std::size_t kept = 0;
};

class TrainingTask {
 public:
  virtual ~TrainingTask() = default;

  virtual ParameterTable& params() = 0;
  virtual std::string describe() const = 0;  // for the start table
  virtual bool bf16() const = 0;             // weights and activations
  // Names of TrainingLoss::terms, for the metrics; `mae`, of 255, is in the log's lines, too.
  virtual std::vector<std::string> terms() const { return {}; }
  // The optimizer's settings for each group of parameters (nn/parameters.h).
  virtual std::vector<TrainDeck> optimizers() const = 0;
  // The first groups, whose joint norm of the gradient is the step's; others are the parameters of
  // a loss (a discriminator).
  virtual int model_groups() const { return 1; }

  // Exit::usage or Exit::data unless the model can train on these buckets. Reads no file: enough to
  // plan with.
  virtual void check(std::span<const Bucket> buckets) = 0;
  // The same, and opens what else training reads.
  virtual void open(std::span<const Bucket> buckets) = 0;
  // Sets the initial values of a new run in the allocated params(): drawn, or from the deck's
  // files. Returns what was read, for the log; "" for nothing.
  virtual std::string start_weights() = 0;

  // The ranks that share each clip with this one (null: none). Exit::usage from a task that cannot
  // share. A dry run asks for rank and size alone.
  virtual void share_clips(Communicator* group) = 0;
  // Seconds that the host has waited within micro-batches for other ranks since the start.
  virtual double blocked_seconds() const { return 0; }
  // How many of a run's ranks, consecutive ones, exchange within a micro-batch (batch norm over
  // ranks). With more than one, each rank takes every ranks-th micro-batch of a step, so that all
  // have equally many.
  virtual int lockstep_ranks(int ranks) const { return 1; }
  // Collective, before the first micro-batch: makes the communicator of these exchanges, split off
  // `whole`, a communicator of the world, if there is one. Exit::usage where `world` cannot be
  // divided as the deck wants it.
  virtual void join_ranks(MPI_Comm world, Communicator* whole) {}
  // That communicator, for the trainer's timeouts and checks. Null: none.
  virtual Communicator* inner_ranks() { return nullptr; }

  // How the names of parameters begin that belong to the model's blocks, before the block's number
  // ("blocks."), if a micro-batch has one part and each forward uses the blocks one after the
  // other, in the order in which they were registered: parallel.zero = 3 shares them out. None: it
  // cannot.
  virtual std::vector<std::string> blocks_named() const { return {}; }
  // Blocks of the model that can be recomputed for a clip of this bucket, and the least share of
  // them that the deck asks for.
  virtual std::int64_t blocks(const Bucket& bucket) const { return 0; }
  virtual double least_recompute() const { return 0; }
  // Operations of a clip, in any unit: forward, backward, and the recomputed share `recompute` of
  // the blocks.
  virtual double cost(const Bucket& bucket, double recompute) const = 0;
  // What a micro-batch takes besides its clips, in the same unit.
  virtual double cost_of_micro_batch() const { return 0; }
  // The share of that cost that a micro-batch's clips take in this step, on average: less than 1 if
  // some are shortened.
  virtual double share(const Bucket& bucket, const MicroBatch& clips, std::int64_t step) const {
    return 1;
  }

  // `bytes` u8 holds the clips on this rank's device (train/step_work.h); each clip's loss counts
  // `weight` times. Everything random is a function of (seed, step, sample id). While planning,
  // `clips` holds nothing but its number of clips and `bytes` is undefined.
  virtual TrainingWork prepare(const Bucket& bucket, const LoadedBatch& clips, const Tensor& bytes,
                               double recompute, float weight) = 0;

  // How `data`, which training does not see and which outlives the set, is measured by the weights
  // in params() (train/validation.h); after open(). Exit::usage from a task that cannot measure it.
  virtual std::unique_ptr<ValidationSet> validation_set(const HeldOut& data);

  // Called after each step of `clips` clips, once all ranks' terms are in `report`'s rows. On a GPU
  // it may only issue work, since the rows are not on the host yet.
  virtual void end_step(const StepReport& report, std::int64_t step, std::int64_t clips) {}
  // What a checkpoint holds besides parameters and optimizer, the same on all ranks; empty:
  // nothing. set_state() is called after open().
  virtual std::string state() const { return {}; }
  virtual void set_state(const std::string& text) {}

  // What a plan reports and no dry run shows. bytes_beside: that the training of a clip reads
  // besides the clip; other_weights: bytes of weights outside the table of trained parameters.
  struct ClipFacts {
    std::string unit = "clips";  // in which work is counted, such as tokens
    std::int64_t units = 1;      // of a clip of the bucket
    double bytes_beside = 0;
    std::size_t other_weights = 0;
  };
  virtual ClipFacts facts(const Bucket& bucket) { return {}; }
};

// Makes the task of a deck, which outlives it (models/registry.h).
using TaskFactory = std::function<std::unique_ptr<TrainingTask>(const Deck& deck)>;

// The work of a micro-batch of so many clips for a dry run: the current arena only plans.
inline TrainingWork dry_work(TrainingTask& task, const Bucket& bucket, std::int64_t clips,
                             double recompute) {
  LoadedBatch batch;
  batch.what.clips.resize(clips);
  return task.prepare(bucket, batch, Tensor(), recompute, 1.0f);
}

// Forward and backward of all parts. `on_loss` gets each part's losses; `counting`: uses of
// parameters are counted in the last part. Returns how much of work.kept was used, by the part that
// used most.
std::size_t run_parts(const TrainingWork& work, ParameterTable& params, bool counting,
                      const std::function<void(const TrainingLoss&)>& on_loss);

}  // namespace weft
