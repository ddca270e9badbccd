// `weft sample`: clips from a trained model.
#pragma once

#include <mpi.h>

#include "config/command.h"

namespace weft {

// The table [sample] of the deck.
struct SampleDeck {
  std::string weights;
  bool ema = true;
  std::int64_t clips = 1;
  std::int64_t frames = 0;
  std::int64_t height = 0;
  std::int64_t width = 0;
  double fps = 24;
  std::int64_t condition_frames = 0;
  std::int64_t condition_clip = 0;
  std::string output;
};
DeckTable sample_table();

// Collective: clip i is made by rank i % ranks. Weights come from sample.weights (safetensors) or from the newest
// checkpoint of run.dir (its EMA, unless sample.ema is false). A model of pixels (in_channels = 3) writes one MP4 a clip
// and one contact sheet; a model of latents writes safetensors. Returns the exit code.
int sample(const Deck& deck, MPI_Comm world);
Command sample_command();

}  // namespace weft
