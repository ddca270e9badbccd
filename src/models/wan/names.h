// Names in Wan's weight files (docs/models/wan.md, Weights).
#pragma once

#include "checkpoint/weights.h"

namespace weft {

// Parameters of the network have the names that Wan releases, which is what is written. Files may
// have them behind "model.diffusion_model.", as repackagings do, or be diffusers'
// WanTransformer3DModel.
WeightNames wan_weight_names();

}  // namespace weft
