// LoRA (Hu et al., arXiv 2106.09685): a training that leaves the model's weights as they are, its
// base, and trains for chosen linear layers two narrow matrices, an adapter: A [rank, in] and B
// [out, rank]. The layer then gives x W^T + bias + alpha/rank (x A^T) B^T (nn/nn.h). Adapters as
// files, and adapters added to weights: checkpoint/adapter.h.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "checkpoint/adapter.h"
#include "config/deck_table.h"
#include "nn/nn.h"

namespace weft {

// The table [lora].
struct LoraDeck {
  std::int64_t rank = 0;  // 0: off
  double alpha = 8;
  std::vector<std::string> targets = {"*.attn.*", "*.cross_attn.*"};
  std::vector<std::string> adapters;  // model.adapters

  bool on() const { return rank > 0; }
};
DeckTable lora_table();
DeckTable adapters_table();  // its key of [model]
// The same for Wan, whose layers have other names.
struct WanLoraDeck : LoraDeck {
  WanLoraDeck() { targets = {"*.self_attn.*", "*.cross_attn.*"}; }
};
DeckTable wan_lora_table();
DeckTable wan_adapters_table();
// That of the model that model.name names.
LoraDeck& lora_deck(Deck& deck);
const LoraDeck& lora_deck(const Deck& deck);

// "spatial_blocks.0.attn.qkv" of the parameter "spatial_blocks.0.attn.qkv.weight".
std::string layer_name(const Parameter& weight);

// Turns every parameter of the table into base, and gives each of `layers` whose name a target
// matches its adapter: parameters NAME.lora_A.weight, which start as PEFT's do (uniform of half
// width 1/sqrt(in)), and NAME.lora_B.weight, which start at 0. Before allocate(). Exit::usage for a
// target that matches none of `layers`; the hint names the nearest.
void add_adapters(const LoraDeck& lora, ParameterTable& table, std::span<nn::Linear* const> layers);
// Sets them, in the allocated table, to those of `adapter`, times `factor`. Exit::usage unless it
// has the deck's rank, alpha and layers.
void start_from(const LoraDeck& lora, ParameterTable& table, const Adapter& adapter, double factor);

}  // namespace weft
