// Data parallelism (ZeRO stage 1: Rajbhandari et al., arXiv 1910.02054): gradients are summed over
// all ranks while the backward runs, each rank does its share of the optimizer's work, and the new
// weights are gathered during the next forward. With parallel.zero = 0 gradients are summed whole
// and every rank does all of the optimizer's work. With parallel.zero = 3 the blocks' weights and
// gradients are in parts too (train/sharded_blocks.h), and all else is as with 1.
//
// Order of the collectives, the same on every rank: gradient buckets 0, 1, ... (the backward's
// order), the step's report, the gradient's norm, weight buckets ..., 1, 0 (the forward's order).
// Those of sharded buckets come within the micro-batches, before all others of a step.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "config/deck.h"
#include "nn/parameters.h"
#include "parallel/communicator.h"
#include "train/sharded_blocks.h"

namespace weft {

// MiB of gradients in a bucket (parallel.bucket_mib), on so many ranks where the deck leaves it to
// weft. A collective over n ranks moves an nth of a bucket at a time, and each of those messages
// has a latency: below some 3/4 MiB a message the latency shows. So a bucket grows with the ranks,
// up to 200 MiB: no backward pass hides the sum of the last bucket, which takes longer with its
// size.
double bucket_mib(const ParallelDeck& deck, int ranks);
// The same in f32 elements, as ParameterTable::allocate() takes it.
std::int64_t bucket_elements(const ParallelDeck& deck, int ranks);

// Whether parallel.zero = 3 can shard a model whose blocks' names begin with `blocks`
// (TrainingTask::blocks_named): not without any, nor in a training of adapters, whose base stays
// whole.
bool can_shard(const ParameterTable& table, const std::vector<std::string>& blocks);
// What it shards then; nothing on one rank or with another stage. Exit::usage for a model that
// names no blocks.
std::optional<Sharding> sharding_of(const ParallelDeck& deck, const ParameterTable& table,
                                    std::vector<std::string> blocks, int rank, int ranks);

// The settings with the model's own in place of "auto" and -1. optimizer_step() does it with those
// of the video models.
TrainDeck optimizer_of(const TrainDeck& deck, const std::string& optimizer, double lr_power,
                       double weight_decay, double grad_clip);

// lr of a step that follows `steps_done` finished ones: linear warm-up, then what lr_scheduler says
// (docs/train.md, Learning rate). A function of the deck and the step alone.
double learning_rate(const TrainDeck& d, std::int64_t steps_done);

// One step of AdamW or SGD for the owned part of one bucket with gradients clipped to d.grad_clip
// (0: not clipped), given the sum of the squares of all gradients, f64 [1] on their device
// (ops/optimizer.h), and the moving averages, whose decays are those of `state`. Changes nothing
// where that sum is not finite.
void optimizer_step(const TrainDeck& deck, std::int64_t steps_done, const Tensor& squares,
                    OptimizerState& state, int bucket);

class DataParallel {
 public:
  // `comm` spans all ranks that hold the model. `aside` runs host work in the middle of device work
  // that may be recorded (train/step_work.h). The first `joint_groups` groups of parameters have
  // one norm together, which stands with the first of them.
  DataParallel(const ParallelDeck& deck, Communicator& comm, ParameterTable& table,
               std::function<void(std::function<void()>)> aside, int joint_groups = 1);

  // The optimizer's state, made from the table's weights. `squares`: with AdamW's second moments.
  // `ema_decays`: a moving average of the weights for each.
  void make_state(bool squares, std::vector<double> ema_decays);
  OptimizerState& state() { return *state_; }
  // After master weights were read from a checkpoint: updates every copy on every rank.
  void spread_weights();

  // Begins a step: each bucket's sum over ranks is issued once the table reports its gradients
  // ready. `local` f64 [1] gets the sum of squares of this rank's own gradients (not finite: the
  // fault is this rank's).
  void begin_step(const Tensor& local);
  // Waits for the sums. Returns the seconds that the host was blocked.
  double join();
  // `squares` f64 [groups] = sums of squares of the summed gradient of each group of parameters,
  // the same bits on every rank. NaN if it was not finite before, or if any value `reported` f64 by
  // the ranks is not: a GPU may be a step ahead of the host's check. Returns the seconds blocked.
  double norm(const Tensor& reported, Tensor& squares);
  // What parallel.zero = 3 needs: whether all ranks must go through the same number of
  // micro-batches. One begins, or is passed without clips. Forwards begin, or with `backward` whole
  // micro-batches, of which each rank has its own number until end_passes() (collective; more calls
  // of it do nothing).
  bool in_lockstep() const { return blocks_ != nullptr; }
  void begin_micro_batch() { table_.begin_micro_batch(); }
  void pass_without_clips() { table_.walk(true, true); }
  void begin_passes(bool backward);
  void end_passes();
  // The optimizer's step, bucket by bucket, with the settings of each group; issues the gathers of
  // the new weights. Returns the seconds blocked (without overlap).
  double update(std::span<const TrainDeck> groups, std::int64_t steps_done, const Tensor& squares);
  // Waits for weights that are still on their way.
  void settle();
  // Seconds that forwards were blocked waiting for weights, since the last call.
  double take_blocked();

 private:
  Tensor group_of(int bucket, const Tensor& squares) const;
  void reduce(int bucket);
  void arrive(int bucket);

  Communicator& comm_;
  ParameterTable& table_;
  int joint_groups_;
  bool sharded_, overlap_;
  CommDtype comm_dtype_;
  std::function<void(std::function<void()>)> aside_;
  std::unique_ptr<OptimizerState> state_;
  std::unique_ptr<ShardedBlocks> blocks_;  // null: no bucket is sharded
  Tensor local_;
  std::vector<Communicator::Ticket> sums_;     // [bucket], of this step
  std::vector<Communicator::Ticket> weights_;  // [bucket], on their way
  double blocked_ = 0;
};

// For tests (core/faults.h): a gradient of this rank becomes NaN, if it is in this bucket.
void spoil_gradient(ParameterTable& table, int bucket);

}  // namespace weft
