// Wan's tables of the deck: [model], and [diffusion] for its training.
#pragma once

#include <string>
#include <vector>

#include "config/deck.h"
#include "models/flow_sampler.h"

namespace weft {

// The network's shape (docs/models/wan.md, Configuration) and how it trains. The default is that of
// Wan2.1-T2V-1.3B.
struct WanDeck {
  std::string variant = "t2v";
  std::int64_t in_channels = 16;
  std::int64_t out_channels = 0;  // 0: in_channels
  std::vector<std::int64_t> patch_size = {1, 2, 2};
  std::int64_t hidden_size = 1536;
  std::int64_t depth = 30;
  std::int64_t num_heads = 12;
  std::int64_t ffn_dim = 8960;
  std::int64_t text_dim = 4096;
  std::int64_t text_len = 512;
  std::int64_t freq_dim = 256;
  double class_dropout_prob = 0;

  std::int64_t latent_channels() const { return out_channels > 0 ? out_channels : in_channels; }
};
// What the network is made of: its shape, and what the deck says of any model.
struct WanConfig : WanDeck {
  std::string dtype = "f32";
  double recompute = 0;  // share of the blocks
};
WanConfig wan_config(const Deck& deck);

// Noise levels of training and the weight of each in the loss (docs/models/wan.md, Training).
struct WanDiffusionDeck {
  std::string sample_method = "uniform";
  double loc = 0.0;
  double scale = 1.0;
  double shift = 3.0;
  std::string weighting = "none";
  std::vector<double> noise_range = {0, 1};
  double first_frame = 0;
};
// Sampling as Wan2.1 is released: [sampler] with other defaults (docs/generate.md, Solvers).
struct WanSamplerDeck : SamplerDeck {
  static constexpr bool has_experts = true;
  WanSamplerDeck() {
    solver = "unipc";
    steps = 50;
    cfg_scale = {5};
    shift = 5;
    use_timestep_transform = false;
  }
};
std::vector<DeckTable> wan_tables();

// The table [vae] of the deck where the model is Wan or its VAE.
// Shape of Wan's VAE (docs/models/wan_vae.md) and how it is run. That of Wan2.1 is the default.
struct WanVaeDeck {
  std::string variant = "2.1";
  std::string weights;
  std::int64_t filters = 96;
  std::int64_t decoder_filters = 0;  // 0: filters
  std::int64_t z_channels = 16;
  std::int64_t patch_size = 1;
  std::vector<std::int64_t> channel_multipliers = {1, 2, 4, 4};
  std::int64_t num_res_blocks = 2;
  std::vector<bool> temporal_downsample = {false, true, true};
  std::int64_t chunk_latents = 1;
  std::string dtype = "f32";
};

std::vector<DeckTable> wan_vae_tables();

}  // namespace weft
