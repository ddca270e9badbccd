// `weft export RUN OUT.safetensors`: a run's weights under the released names, for the original
// PyTorch code.
#pragma once

#include <string>

#include "config/command.h"

namespace weft {

struct ExportRequest {
  std::string run;     // a run directory (its newest usable checkpoint) or one checkpoint directory
  std::string output;  // NAME.safetensors
  bool ema = false;    // the averaged weights
  std::string dtype = "f32";
  double shard_size = 0;  // GB (10^9 bytes) of a shard; 0: one file
  std::string latents;    // of a VAE: a store that `weft encode` made with it; "": none
};

// A VAE's file also has the buffers "scale" and "shift", but not the discriminator that it was
// trained against. The buffers come from `latents`, if given, where encode has measured them,
// otherwise from the run's deck; if that has none, they are left out.
int export_weights(const ExportRequest& request);
Command export_command();

}  // namespace weft
