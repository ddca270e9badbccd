// What a training step costs, by a dry run: the task's own code runs in an arena that only plans
// (tensor/tensor.h), where every operation tells its name and its tensors' shapes. They give
// operations and bytes, a device's rates turn these into seconds. All times in seconds.
#pragma once

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
  double convolutions = 0;        // FLOP/s; 0: not known
  // Attention over all tokens of a clip (ops/attention.h, attention_forward), whose heads of 128
  // channels fill the tensor cores better; 0: as other attention.
  double wide_heads_forward = 0, wide_heads_backward = 0;
  double fp8_products = 0;  // of operands in e4m3 (ops/fp8.h), FLOP/s; 0: as others
};
// Targets for an H200 (docs/plan.md, Targets), not measurements.
Rates h200_targets();
// Rates from a JSON file with the names above as keys. Optional are "origin",
// "convolutions" where the planned model has none, "wide_heads_forward", "wide_heads_backward" and
// "fp8_products". Exit::usage for any other content.
Rates read_rates(const std::string& file);

// What a micro-batch takes on one rank (one of `sp` that share its tokens).
struct MicroBatchCost {
  double forward = 0;
  double backward = 0;  // without recomputation
  double again = 0;     // recomputation, spread over the backward
  double exchange = 0;  // between ranks within the micro-batch, forward and backward together
  double flops = 0;     // of the model on this rank: nothing counted twice
  // What ranks that share the statistics of batch norm sum up meanwhile. Its time depends on their
  // number (plan/step_model.h) and is in none of the above.
  int all_reduces = 0;
  double all_reduce_bytes = 0;  // of all of them, on a rank

  double seconds() const { return forward + backward + again + exchange; }
  // The cost of a micro-batch with that share of the work, and as many exchanges.
  MicroBatchCost part(double share) const {
    return {share * forward, share * backward, share * again,   share * exchange,
            share * flops,   all_reduces,      all_reduce_bytes};
  }
};

// One bucket of gradients, in the order in which they go on the wire.
struct BucketSchedule {
  std::int64_t elements = 0;  // padded; 4 B each in f32, 2 B as bf16
  bool bf16_only = false;     // weights gathered as bf16 in a bf16 model, else as f32
  double ready = 0;           // complete when this share of the last micro-batch's backward is done
  double needed = 0;     // its weights are first used when this share of the next forward is done
  bool sharded = false;  // gathered and summed in every micro-batch (parallel.zero = 3)
};

// While it lives, adds up what the operations of this thread's dry runs would take: of each the
// larger of FLOPs over their rate and bytes over the bandwidth (ops/cost.h).
// `also` is notified, too.
class OpTimes : public ops::OpWatch {
 public:
  explicit OpTimes(const Rates& rates, ops::OpWatch* also = nullptr) : rates_(rates), also_(also) {
    ops::set_op_watch(this);
  }
  ~OpTimes() override { ops::set_op_watch(nullptr); }
  OpTimes(const OpTimes&) = delete;
  OpTimes& operator=(const OpTimes&) = delete;

  // Exit::usage for a convolution if the rates have none.
  void met(const std::string& name, const ops::Cost& cost,
           std::span<const Tensor> tensors) override;
  void exchanged(const std::string& collective, double bytes) override;

  double seconds() const { return seconds_; }  // without exchanges
  // Operations of the model: the products that an attention's backward repeats do not count.
  double flops() const { return flops_; }
  double bytes_sent() const { return bytes_sent_; }  // to ranks that share the work
  int all_reduces() const { return all_reduces_; }
  double all_reduce_bytes() const { return all_reduce_bytes_; }

 private:
  const Rates& rates_;
  ops::OpWatch* also_;
  double seconds_ = 0, flops_ = 0, bytes_sent_ = 0, all_reduce_bytes_ = 0;
  int all_reduces_ = 0;
};

// A micro-batch of that many clips with the share `recompute` of its blocks recomputed, on a device
// of that kind (which need not be here), one of ranks that share it over links of `link` B/s. The
// parameters must be laid out. `watch` is notified of the operations without recomputation.
MicroBatchCost dry_run_cost(TrainingTask& task, const Bucket& bucket, std::int64_t clips,
                            double recompute, DeviceKind device, const Rates& rates, double link,
                            ops::OpWatch* watch = nullptr);
// When each bucket of gradients is complete and its weights are used, of the bucket with the
// largest clips: the shares hardly depend on it.
std::vector<BucketSchedule> dry_run_schedule(TrainingTask& task, std::span<const Bucket> buckets,
                                             DeviceKind device, const Rates& rates);

}  // namespace weft
