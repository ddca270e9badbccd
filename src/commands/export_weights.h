// `weft export RUN OUT.safetensors`: a run's weights under the released names, for the original PyTorch code.
#pragma once

#include <string>

namespace weft {

// `run` is a run directory (its newest usable checkpoint) or one checkpoint directory. `ema`: the averaged weights.
int export_weights(const std::string& run, const std::string& output, bool ema);

}  // namespace weft
