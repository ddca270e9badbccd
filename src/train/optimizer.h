// AdamW with EMA, and its learning rate.
#pragma once

#include "config/deck.h"
#include "nn/optimizer_state.h"

namespace weft {

// lr of a step that follows `steps_done` finished ones: linear warm-up, then constant (specs/training.md 7).
double learning_rate(const TrainDeck& d, std::int64_t steps_done);

// One AdamW step of the owned part of one bucket with gradients clipped to d.grad_clip (0: not clipped), given the sum of
// the squares of all gradients, f64 [1] on their device (ops/optimizer.h). Changes nothing where that is not finite.
void optimizer_step(const TrainDeck& d, std::int64_t steps_done, const Tensor& squares,
                    OptimizerState& state, int bucket);

}  // namespace weft
