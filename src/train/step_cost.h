// What a training step of a model costs: the terms in which models answer `weft plan`
// (TrainingTask), and the dry run that answers for models without formulas of their own. All times
// in seconds.
#pragma once

#include <mpi.h>

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "data/clip_source.h"
#include "nn/parameters.h"
#include "ops/dispatch.h"

namespace weft {

class TrainingTask;

// How fast a device works. Attention is counted at its least number of operations: 4 S C N forward,
// 2.5 times that backward.
struct Rates {
  double products = 0;            // matrix products, FLOP/s
  double attention_forward = 0;   // FLOP/s
  double attention_backward = 0;  // FLOP/s
  double bandwidth = 0;           // operations that memory bounds, B/s
  double gaps = 0;                // share added for launches and gaps
  std::string origin;             // where the figures come from: printed in every report
  double convolutions = 0;        // FLOP/s of the VAE's (OpTimes); 0: not known
};
// Targets for an H200 (docs/plan.md, Targets), not measurements.
Rates h200_targets();
// Rates from a JSON file with the names above as keys. "origin" is optional, and so is
// "convolutions" where the planned model has none. Exit::usage for any other content.
Rates read_rates(const std::string& file);

// What a micro-batch takes on one rank (one of `sp` that share its tokens).
struct MicroBatchCost {
  double forward = 0;
  double backward = 0;  // without recomputation
  double again = 0;     // recomputation, spread over the backward
  double exchange = 0;  // in exchanges of sequence parallelism, forward and backward together
  double flops = 0;     // of the model on this rank: 3 times the forward, nothing counted twice
  double seconds() const { return forward + backward + again + exchange; }
  MicroBatchCost part(double share) const {
    return {share * forward, share * backward, share * again, share * exchange, share * flops};
  }
};

// One bucket of gradients, in the order in which they go on the wire.
struct BucketSchedule {
  std::int64_t elements = 0;  // padded; 4 B each in f32, 2 B as bf16
  bool bf16_only = false;     // weights gathered as bf16 in a bf16 model, else as f32
  double ready = 0;           // complete when this share of the last micro-batch's backward is done
  double needed = 0;  // its weights are first used when this share of the next forward is done
};

// A plan's micro-batches: [bucket] clips in each, and the share of the blocks that is recomputed
// (train/memory_plan.h).
struct PlannedWork {
  std::span<const Bucket> buckets;
  std::vector<std::int64_t> clips;
  std::vector<double> recompute;
};

// What a model measured on this host (train/measure.h).
struct MeasuredWork {
  std::vector<MicroBatchCost> costs;  // [bucket], a micro-batch; means over the ranks
  double update_seconds_an_element = 0;
  std::string how;  // printed in the report
};

// The least number of operations of one call: a convolution 2 numel(y) Cin kt kh kw, an upsampled
// one 4/9 of that (ops/conv.h), the VAE's attention 4 P P C forward and 2.5 times that backward. 0
// for operations that memory bounds.
double operations_of(const std::string& name, std::span<const Tensor> tensors);

// While it lives, adds up the time that the operations of this thread's dry runs would take: the
// larger of FLOPs over their rate and tensors' bytes over the bandwidth.
class OpTimes : public ops::OpWatch {
 public:
  // Exit::usage if the rates have none for convolutions.
  explicit OpTimes(const Rates& rates);
  ~OpTimes() override { ops::set_op_watch(nullptr); }
  OpTimes(const OpTimes&) = delete;
  OpTimes& operator=(const OpTimes&) = delete;

  void met(const std::string& name, std::span<const Tensor> tensors) override;
  double seconds() const { return seconds_; }
  double flops() const { return flops_; }

 private:
  const Rates& rates_;
  double seconds_ = 0, flops_ = 0;
};

// By dry runs of the task's micro-batches, operation by operation. The parameters must be laid out.
MicroBatchCost dry_run_cost(TrainingTask& task, const Bucket& bucket, std::int64_t clips,
                            double recompute, const Rates& rates);
std::vector<BucketSchedule> dry_run_schedule(TrainingTask& task, std::span<const Bucket> buckets);

}  // namespace weft
