// `weft sample`: clips from a trained model.
#pragma once

#include <mpi.h>

#include "config/deck.h"

namespace weft {

// Collective: clip i is made by rank i % ranks. Weights come from sample.weights (safetensors) or from the newest
// checkpoint of run.dir (its EMA, unless sample.ema is false). A model of pixels (in_channels = 3) writes one MP4 a clip
// and one contact sheet; a model of latents writes safetensors. Returns the exit code.
int sample(const Deck& deck, MPI_Comm world);

}  // namespace weft
