// The training state as a checkpoint sees it, and back.
#pragma once

#include "core/deck.h"
#include "nn/parameters.h"
#include "train/checkpoint.h"
#include "train/optimizer.h"

namespace weft {

// What a checkpoint says of this state after `steps_done` steps.
CheckpointInfo describe_state(const Deck& deck, ParameterTable& table, std::int64_t steps_done);

// The flat arrays of the state, master, exp_avg, exp_avg_sq, ema and fixed, as rank `rank` of `ranks` saves them.
std::vector<FlatArray> flat_arrays(ParameterTable& table, const OptimizerState& state, int rank,
                                   int ranks);

// Reads the weights of a checkpoint into the table. Tensors are found by their released names, so the layout may differ.
// Exit::checkpoint names the first tensor that does not fit.
void restore_state(const Checkpoint& checkpoint, ParameterTable& table);
// The same for the masters, moments and EMA that this rank holds, and for what is not trained. Weights that other ranks hold
// are to be spread afterwards (DataParallel::spread_weights).
void restore_state(const Checkpoint& checkpoint, ParameterTable& table, OptimizerState& state);

// As above, but the weights are the EMA's.
void restore_ema(const Checkpoint& checkpoint, ParameterTable& table);

}  // namespace weft
