// The mean loss of the clips of each of several stores in a step: sums on the device, by masks of
// whose clips a micro-batch holds, into slots of the step's report.
#pragma once

#include <cstdint>
#include <span>

#include "data/step_plan.h"
#include "tensor/tensor.h"
#include "train/metrics/metrics.h"
#include "train/metrics/step_report.h"

namespace weft {

class StoreLosses {
 public:
  // With fewer than two stores it does nothing.
  StoreLosses(const ClipSource& source, std::span<const std::int64_t> batch_sizes);

  // Before a micro-batch is run, outside of what is recorded: its masks to the device.
  void begin(const MicroBatch& clips);
  // Each clip's loss f32 [n], of the next n clips of the micro-batch, to the store's slot.
  void add(const Tensor& losses, StepReport& report);

 private:
  const ClipSource& source_;
  std::int64_t stores_, most_;  // most_: clips of a micro-batch
  Tensor masks_, masked_;       // f32 [stores * most], [most]
  std::int64_t done_ = 0;       // clips of this micro-batch
};

// Fills the losses of metrics that have their stores' names and counts.
void sum_up_stores(const StepReport::Rows& rows, StepMetrics& metrics);

}  // namespace weft
