// STDiT3's tables of the deck: [model] and [mask], and those of its sampler
// (models/flow_sampler.h).
#pragma once

#include "config/deck.h"

namespace weft {

// The network's shape (docs/models/stdit3.md, Configuration) and how it trains. The default is
// Open-Sora 1.2's.
struct Stdit3Deck {
  std::int64_t in_channels = 4;
  std::vector<std::int64_t> patch_size = {1, 2, 2};
  std::int64_t hidden_size = 1152;
  std::int64_t depth = 28;
  std::int64_t num_heads = 16;
  double mlp_ratio = 4.0;
  double class_dropout_prob = 0.1;
  bool pred_sigma = true;
  double drop_path = 0.0;
  std::int64_t caption_channels = 4096;
  std::int64_t model_max_length = 300;
  bool qk_norm = true;
  double input_sq_size = 512;
  bool only_train_temporal = false;
  bool freeze_y_embedder = false;
};
// What the network is made of: its shape, and what the deck says of any model.
struct Stdit3Config : Stdit3Deck {
  std::string dtype = "f32";
  double recompute = 0;  // share of the blocks
};
Stdit3Config stdit3_config(const Deck& deck);
// Share of samples that train with each frame mask (docs/models/stdit3.md, Frame masks); the rest
// has none.
struct MaskDeck {
  double random = 0, intepolate = 0;
  double quarter_random = 0, quarter_head = 0, quarter_tail = 0, quarter_head_tail = 0;
  double image_random = 0, image_head = 0, image_tail = 0, image_head_tail = 0;
};
std::vector<DeckTable> stdit3_tables();

}  // namespace weft
