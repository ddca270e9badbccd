// What a training run trains. The trainer (train/trainer.h) and the planner (plan/plan.h) know
// parameters, micro-batches and losses; the task knows the model behind them: what a step computes,
// what it costs, and what of it can be recomputed.
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "config/deck.h"
#include "data/prefetch.h"
#include "nn/parameters.h"
#include "nn/tape.h"
#include "parallel/communicator.h"
#include "train/step_cost.h"

namespace weft {

class StepReport;

struct TrainingLoss {
  Tensor clips;  // f32 [clips], the loss of each
  Tensor terms;  // f32 [terms of the task], what these are made of, summed over the clips;
                 // undefined where there are none
};

// A micro-batch, ready to be computed: its tensors are made, its draws are drawn.
struct TrainingWork {
  // The gradient of weight * (sum of the part's losses) waits in the tape, or is in the table
  // already.
  using Part = std::function<TrainingLoss(Tape& tape, float weight)>;
  // Parts run one after the other, each with a backward of its own: memory is that of one. While
  // uses are counted (nn/parameters.h), they are counted in the last alone.
  std::vector<Part> parts;
  // What the work depends on besides bucket and weight (train/step_device.h); empty: it is never
  // recorded.
  std::string key;
};

class TrainingTask {
 public:
  virtual ~TrainingTask() = default;

  virtual ParameterTable& params() = 0;
  virtual std::string describe() const = 0;  // for the start table
  virtual bool bf16() const = 0;             // weights and activations
  // Names of TrainingLoss::terms, for the metrics.
  virtual std::vector<std::string> terms() const { return {}; }
  // The optimizer's settings for each group of parameters (nn/parameters.h).
  virtual std::vector<TrainDeck> optimizers() const = 0;

  // Checks that the buckets fit the model, and opens what else training reads. Exit::usage,
  // Exit::data.
  virtual void open(std::span<const Bucket> buckets) = 0;
  // Values to start a new run with, into params() that are allocated: drawn, or from the deck's
  // file.
  virtual void start_weights() = 0;

  // The ranks that share each clip with this one (null: none). Exit::usage from a task that cannot
  // share.
  virtual void share_clips(Communicator* group) = 0;
  // Seconds, since the beginning, that the host waited for them.
  virtual double blocked_seconds() const { return 0; }

  // Blocks of the model that can be recomputed for a clip of this bucket, and the least share of
  // them that the deck asks for.
  virtual std::int64_t blocks(const Bucket& bucket) const = 0;
  virtual double least_recompute() const { return 0; }
  // Operations of a clip: forward, backward, and the share `recompute` of the blocks again. In any
  // unit.
  virtual double cost(const Bucket& bucket, double recompute) const = 0;
  // The share of that which the clips of a micro-batch take in that step, on average: less than 1
  // where some are shortened.
  virtual double share(const Bucket& bucket, const MicroBatch& clips, std::int64_t step) const {
    return 1;
  }

  // `bytes` u8 holds the clips on this rank's device (train/step_device.h). Everything random is a
  // function of (seed, step, sample id). While planning, `clips` holds nothing but its number of
  // clips and `bytes` is undefined.
  virtual TrainingWork prepare(const Bucket& bucket, const LoadedBatch& clips, const Tensor& bytes,
                               double recompute) = 0;

  // After each step of `clips` clips, once all ranks' terms are in `report`'s rows; on a GPU only
  // work for it may be issued.
  virtual void end_step(const StepReport& report, std::int64_t step, std::int64_t clips) {}
  // What a restart needs beside parameters and optimizer, alike on all ranks, for the checkpoint;
  // empty: nothing. set_state() comes after open().
  virtual std::string state() const { return {}; }
  virtual void set_state(const std::string& text) {}

  // The rest is what `weft plan` asks. Checks that the model can train on such clips; opens no
  // file. `local`: on this host, whose ranks are measured.
  virtual void check_plan(std::span<const Bucket> buckets, bool local) = 0;
  // Bytes of weights that stand in no table of trained parameters.
  virtual std::size_t other_weights() const { return 0; }
  // Bytes that a clip's training reads besides the clip.
  virtual double bytes_beside_clip() const { return 0; }
  // How its work is counted, and how much of it there is in so many clips.
  virtual std::string unit() const = 0;
  virtual std::int64_t units(const Bucket& bucket, std::int64_t clips) = 0;
  // Of params() that are laid out: when each bucket of gradients is complete, and when its weights
  // are used. By a dry run.
  virtual std::vector<BucketSchedule> schedule(std::span<const Bucket> buckets);
  // [bucket] By the rates, on one of parallel.sp ranks with links of that many B/s between them. By
  // dry runs.
  virtual std::vector<MicroBatchCost> costs(const PlannedWork& work, const Rates& rates,
                                            double link_bandwidth);
  // Collective: measured on all ranks of `world` at once. Exit::usage from a model that measures
  // nothing.
  virtual MeasuredWork measure(const PlannedWork& work, MPI_Comm world);
};

// Makes the task of a deck, which outlives it (models/registry.h).
using TaskFactory = std::function<std::unique_ptr<TrainingTask>(const Deck& deck)>;

// Forward and backward of all parts. `on_loss` is told each part's losses; `counting`: uses of
// parameters are counted in the last.
void run_parts(const TrainingWork& work, ParameterTable& params, float weight, bool counting,
               const std::function<void(const TrainingLoss&)>& on_loss);

}  // namespace weft
