#include "models/stdit3/options.h"

#include "config/deck_table.h"
#include "models/flow_sampler.h"
#include "models/lora.h"

namespace weft {
namespace {

void model_rows(Rows& r, Stdit3Deck& d) {
  r.number("in_channels", d.in_channels, 1, 4096,
           "Channels of its input: 3 for pixels, 4 for latents of the VAE.");
  r.number("patch_size", d.patch_size, 1, 64, "Patch in frames, rows and columns of the input.");
  r.number("hidden_size", d.hidden_size, 4, 10240, "Channels of a token.");
  r.number("depth", d.depth, 1, 1000, "Pairs of a spatial and a temporal block.");
  r.number("num_heads", d.num_heads, 1, 1024, "Attention heads; divides hidden_size.");
  r.number("mlp_ratio", d.mlp_ratio, 0.01, 64, "Width of the MLP over hidden_size.");
  r.number("class_dropout_prob", d.class_dropout_prob, 0, 1,
           "Share of samples that train without their caption.")
      .decides = false;
  r.flag("pred_sigma", d.pred_sigma,
         "Give the output twice the input's channels, as the released models do.");
  r.number("drop_path", d.drop_path, 0, below_one,
           "Probability of leaving the last block out for a sample; grows linearly with depth.")
      .decides = false;
  r.number("caption_channels", d.caption_channels, 1, 65536,
           "Channels of the caption features: 4096 for T5 XXL.");
  r.number("model_max_length", d.model_max_length, 1, 65536, "Longest caption in tokens.");
  r.flag("qk_norm", d.qk_norm, "Normalise queries and keys in each head.");
  r.number("input_sq_size", d.input_sq_size, 1, 65536,
           "Side in pixels at which the position embedding has scale 1.");
  r.flag("only_train_temporal", d.only_train_temporal, "Train the temporal blocks alone.").decides =
      false;
  r.flag("freeze_y_embedder", d.freeze_y_embedder, "Keep the caption projection as it is.")
      .decides = false;
}

void check_model(const Stdit3Deck& m, const DeckDemand& demand) {
  demand(m.patch_size.size() == 3,
         fmt::format("model.patch_size has {} numbers", m.patch_size.size()),
         "give three: frames, rows and columns, as [1, 2, 2]");
  demand(m.hidden_size % m.num_heads == 0,
         fmt::format("model.hidden_size = {} does not divide by model.num_heads = {}",
                     m.hidden_size, m.num_heads),
         "change either, so that each head has the same number of channels");
  demand(m.hidden_size / m.num_heads % 2 == 0,
         fmt::format("a head has {} channels (model.hidden_size / model.num_heads)",
                     m.hidden_size / m.num_heads),
         "rotary positions turn channels in pairs: make it an even number");
  demand(m.hidden_size % 4 == 0,
         fmt::format("model.hidden_size = {} does not divide by 4", m.hidden_size),
         "the position embedding has sine and cosine for rows and columns: take a multiple of 4");
}

void mask_rows(Rows& r, MaskDeck& d) {
  const auto share = [&r](const char* name, double& target, const char* help) {
    r.number(name, target, 0, 1, help);
  };
  share("random", d.random, "Share of samples with frames masked at random.");
  Option& spelt_as_in_open_sora = r.number(
      "intepolate", d.intepolate, 0, 1,
      "Share with every second frame given (spelt as in Open-Sora; interpolate is read too).");
  spelt_as_in_open_sora.alias = "mask.interpolate";
  spelt_as_in_open_sora.alias_is_older = false;
  share("quarter_random", d.quarter_random, "Share with up to a quarter given, anywhere.");
  share("quarter_head", d.quarter_head, "Share with up to a quarter given at the start.");
  share("quarter_tail", d.quarter_tail, "Share with up to a quarter given at the end.");
  share("quarter_head_tail", d.quarter_head_tail, "Share with up to a quarter given at both ends.");
  share("image_random", d.image_random, "Share with one frame given, anywhere.");
  share("image_head", d.image_head, "Share with the first frame given.");
  share("image_tail", d.image_tail, "Share with the last frame given.");
  share("image_head_tail", d.image_head_tail, "Share with the first and last frame given.");
}

void check_mask(const MaskDeck& k, const DeckDemand& demand) {
  const double masked = k.random + k.intepolate + k.quarter_random + k.quarter_head +
                        k.quarter_tail + k.quarter_head_tail + k.image_random + k.image_head +
                        k.image_tail + k.image_head_tail;
  demand(masked <= 1 + 1e-9, fmt::format("the shares in [mask] add up to {}", masked),
         "lower some: together they are at most 1, and what is left has no mask");
}

}  // namespace

Stdit3Config stdit3_config(const Deck& deck) {
  return {deck.get<Stdit3Deck>(), deck.model.dtype, deck.model.recompute};
}

std::vector<DeckTable> stdit3_tables() {
  std::vector<DeckTable> tables = {deck_table("model", model_rows, check_model), diffusion_table(),
                                   deck_table("mask", mask_rows, check_mask), lora_table(),
                                   adapters_table()};
  for (DeckTable& t : tables) {
    t.next = t.section == "model" ? "model" : "train";
    t.fixed = true;
  }
  tables.push_back(sampler_table());
  return tables;
}

}  // namespace weft
