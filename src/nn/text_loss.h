// The text detector's loss on the tape.
#pragma once

#include "nn/nn.h"
#include "ops/text_loss.h"

namespace weft::nn {

// Loss of probability and threshold, logits [N,1,H,W,1], for flags and thresholds u8 [N,H,W]
// (ops/text_loss.h). Returns stats f64 [ops::text_stats]. The backward needs no start: it sends
// weight * the gradient of stats[ops::text_total] to both.
Tensor text_loss(Context c, const Var& probability, const Var& threshold, const Tensor& flags,
                 const Tensor& thresholds, float weight);

}  // namespace weft::nn
