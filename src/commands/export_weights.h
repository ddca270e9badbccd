// `weft export RUN OUT.safetensors`: a run's weights under the released names, for the original PyTorch code.
#pragma once

#include <string>

namespace weft {

struct ExportRequest {
  std::string run;     // a run directory (its newest usable checkpoint) or one checkpoint directory
  std::string output;  // NAME.safetensors
  bool ema = false;    // the averaged weights
  std::string dtype = "f32";
  double shard_size = 0;  // GB (10^9 bytes) of a shard; 0: one file
};

// Of a VAE also its buffers "scale" and "shift", and not what it was trained against (the discriminator).
int export_weights(const ExportRequest& request);

}  // namespace weft
