#include "models/wan/options.h"

#include "config/deck_table.h"
#include "models/lora.h"
#include "models/stdit3/rectified_flow.h"

namespace weft {
namespace {

void model_rows(Rows& r, WanDeck& d) {
  r.number("in_channels", d.in_channels, 1, 4096, "Channels of its input: those of the latents.");
  r.number("patch_size", d.patch_size, 1, 64, "Patch in frames, rows and columns of the input.");
  r.number("hidden_size", d.hidden_size, 8, 10240, "Channels of a token.");
  r.number("depth", d.depth, 1, 1000, "Blocks.");
  r.number("num_heads", d.num_heads, 1, 1024, "Attention heads; divides hidden_size.");
  r.number("ffn_dim", d.ffn_dim, 1, 1'000'000, "Wan: width of the MLP.");
  r.number("text_dim", d.text_dim, 1, 65536,
           "Wan: channels of the caption features: 4096 for umT5-XXL.");
  r.number("text_len", d.text_len, 1, 65536,
           "Wan: tokens that every caption is padded to, and its longest caption.");
  r.number("freq_dim", d.freq_dim, 2, 65536, "Wan: channels of the timestep's sines and cosines.");
  r.number("class_dropout_prob", d.class_dropout_prob, 0, 1,
           "Share of samples that train without their caption.")
      .decides = false;
}

void check_model(const Deck& deck, const DeckDemand& demand) {
  const WanDeck& m = deck.get<WanDeck>();
  demand(deck.model.name != "wan" || !masks_wanted(deck.get<MaskDeck>()),
         "[mask] has shares of samples, and model.name is \"wan\"",
         "leave [mask] out: this model denoises whole clips, and takes no frame as given");
  demand(m.patch_size.size() == 3,
         fmt::format("model.patch_size has {} numbers", m.patch_size.size()),
         "give three: frames, rows and columns, as [1, 2, 2]");
  demand(m.patch_size[0] == 1,
         fmt::format("model.patch_size takes {} frames together", m.patch_size[0]),
         "set its first number to 1: latents of 4n + 1 frames have n + 1, for any n");
  demand(m.hidden_size % m.num_heads == 0,
         fmt::format("model.hidden_size = {} does not divide by model.num_heads = {}",
                     m.hidden_size, m.num_heads),
         "change either, so that each head has the same number of channels");
  const std::int64_t head = m.hidden_size / m.num_heads;
  demand(head % 8 == 0 && head <= 128,
         fmt::format("a head has {} channels (model.hidden_size / model.num_heads)", head),
         "make it a multiple of 8, at most 128: attention has no other kernel");
  demand(m.freq_dim % 2 == 0, fmt::format("model.freq_dim = {} is odd", m.freq_dim),
         "it is half sines and half cosines: take an even number");
}

// Training alone: the sampler has its own shift ([sampler]).
void diffusion_rows(Rows& r, WanDiffusionDeck& d) {
  r.decide(false);
  r.text("sample_method", d.sample_method, "Distribution of the training timesteps.",
         {"uniform", "logit-normal"});
  r.number("loc", d.loc, -100, 100, "Mean of the normal in logit-normal.");
  r.number("scale", d.scale, 1e-6, 100, "Deviation of the normal in logit-normal.");
  r.number("shift", d.shift, 1e-3, 1000,
           "Wan: moves a drawn noise level u to shift u / (1 + (shift - 1) u); 1 leaves it.");
  r.text("weighting", d.weighting,
         "Wan: factor of a sample's loss: none, or shift for 1 + shift times its noise level.",
         {"none", "shift"});
}

}  // namespace

WanConfig wan_config(const Deck& deck) {
  return {deck.get<WanDeck>(), deck.model.dtype, deck.model.recompute};
}

std::vector<DeckTable> wan_tables() {
  std::vector<DeckTable> tables = {deck_table("model", model_rows),
                                   deck_table("diffusion", diffusion_rows), wan_lora_table(),
                                   wan_adapters_table()};
  tables.front().check = check_model;
  for (DeckTable& t : tables) {
    t.next = t.section == "model" ? "model" : "train";
    t.fixed = true;
  }
  tables.push_back(sampler_table<WanSamplerDeck>());
  return tables;
}

}  // namespace weft
