// The training state as a checkpoint sees it, and back.
#pragma once

#include "checkpoint/checkpoint.h"
#include "config/deck.h"
#include "nn/parameters.h"

namespace weft {

// The description that a checkpoint stores of this state after `steps_done` steps.
CheckpointInfo describe_state(const Deck& deck, ParameterTable& table, std::int64_t steps_done);

// The flat arrays of the state, master, exp_avg, exp_avg_sq, ema and fixed, as rank `rank` of
// `ranks` saves them.
std::vector<FlatArray> flat_arrays(ParameterTable& table, const OptimizerState& state, int rank,
                                   int ranks);

// Reads the weights of a checkpoint into the table, which may be one that is only run
// (allocate_for_inference). Tensors are found by their released names, so the layout may differ,
// and so may what is trained (vae_train.freeze_spatial). Exit::checkpoint names the first tensor
// that does not fit.
void restore_state(const Checkpoint& checkpoint, ParameterTable& table);
// To resume training: reads the masters, moments and EMA that this rank holds, and the untrained
// parameters, which must be the same as in the run. The caller then spreads the weights that other
// ranks hold (DataParallel::spread_weights).
void restore_state(const Checkpoint& checkpoint, ParameterTable& table, OptimizerState& state);

// As above, but the weights are the EMA's.
void restore_ema(const Checkpoint& checkpoint, ParameterTable& table);

}  // namespace weft
