// AdamW and EMA state of the trainable parameters, flat like the parameters themselves.
#pragma once

#include "core/deck.h"
#include "nn/parameters.h"

namespace weft {

struct OptimizerState {
  Tensor exp_avg, exp_avg_sq, ema;  // f32, as long as ParameterTable::values()

  // Zero moments; the EMA starts as a copy of the weights.
  explicit OptimizerState(ParameterTable& table);
};

// lr of a step that follows `steps_done` finished ones: linear warm-up, then constant (specs/training.md 7).
double learning_rate(const TrainDeck& d, std::int64_t steps_done);

// One AdamW step with gradients clipped to d.grad_clip (0: not clipped), given the sum of their squares, f64 [1] on their
// device (ops/optimizer.h). Changes nothing where that is not finite.
void optimizer_step(const TrainDeck& d, std::int64_t steps_done, const Tensor& squares,
                    ParameterTable& table, OptimizerState& state);

}  // namespace weft
