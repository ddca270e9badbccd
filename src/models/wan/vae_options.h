// The table [vae] of the deck where the model is Wan2.1 or its VAE.
#pragma once

#include <string>
#include <vector>

#include "config/deck.h"

namespace weft {

// Shape of Wan2.1's VAE (docs/models/wan_vae.md) and how it is run. The released one is the
// default.
struct WanVaeDeck {
  std::string weights;
  std::int64_t filters = 96;
  std::int64_t z_channels = 16;
  std::vector<std::int64_t> channel_multipliers = {1, 2, 4, 4};
  std::int64_t num_res_blocks = 2;
  std::vector<bool> temporal_downsample = {false, true, true};
  std::int64_t chunk_latents = 1;
  std::string dtype = "f32";
};

std::vector<DeckTable> wan_vae_tables();

}  // namespace weft
