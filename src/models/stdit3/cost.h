// Closed formulas for the time of STDiT3's training step (docs/plan.md, Targets). All times in
// seconds.
#pragma once

#include <vector>

#include "models/stdit3/options.h"
#include "train/step_cost.h"

namespace weft {

// A micro-batch of one bucket: B clips of T frames of S tokens with L caption rows each.
struct MicroBatchShape {
  std::int64_t clips = 1, T = 1, S = 1, L = 300;
  double recompute = 0;  // share of the blocks whose forward runs twice
  std::int64_t tokens() const { return clips * T * S; }
};

// Of a bucket's clips in patches of the model; `recompute` as planned.
MicroBatchShape shape_of(const Stdit3Config& model, const Bucket& bucket, std::int64_t clips,
                         double recompute);

// By the formulas: for each operation the larger of FLOPs over their rate and bytes over the
// bandwidth.
MicroBatchCost micro_batch_cost(const Stdit3Config& model, const MicroBatchShape& shape,
                                const Rates& rates, int sp = 1, double exchange_bandwidth = 0);

// For an allocated table (ParameterTable::allocate). All blocks count the same; layers before and
// after them do not count.
std::vector<BucketSchedule> bucket_schedule(const ParameterTable& table, const Stdit3Config& model);

}  // namespace weft
