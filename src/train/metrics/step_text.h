// A step of a training as a line: of its log, and of weft status --follow.
#pragma once

#include <cstdint>
#include <string>

#include "train/metrics/metrics.h"

namespace weft {

// "step    120/600  loss 0.41207  grad 0.853  lr 2.00e-03  0.031 s  (data 0.1 %, ...)", of `steps`
// in total.
std::string step_text(const StepMetrics& m, std::int64_t steps);

}  // namespace weft
