#include "models/wan/options.h"

#include "config/deck_table.h"
#include "models/lora.h"
#include "models/stdit3/rectified_flow.h"
#include "models/wan/vae.h"

namespace weft {
namespace {

void model_rows(Rows& r, WanDeck& d) {
  r.text("variant", d.variant,
         "Wan: text to video; a picture's latents beside the noisy ones (i2v); a first frame that "
         "is given, or none (ti2v).",
         {"t2v", "i2v", "ti2v"})
      .decides = d.variant != "t2v";
  r.number(
      "in_channels", d.in_channels, 1, 4096,
      "Channels of its input: those of the latents, and with variant = \"i2v\" 4 of a mask and "
      "those of the picture's.");
  r.number("out_channels", d.out_channels, 0, 4096,
           "Wan: channels of the latents that it denoises; 0: in_channels.")
      .decides = d.out_channels > 0;
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
  demand(
      deck.model.name != "wan" || !masks_wanted(deck.get<MaskDeck>()),
      "[mask] has shares of samples, and model.name is \"wan\"",
      "leave [mask] out: Wan learns from given first frames alone (diffusion.first_frame, TI2V)");
  const std::int64_t latent = m.latent_channels(), i2v = 2 * latent + 4;
  demand(m.in_channels == (m.variant == "i2v" ? i2v : latent),
         fmt::format("model.in_channels = {} with out_channels = {} and variant = \"{}\"",
                     m.in_channels, m.out_channels, m.variant),
         m.variant == "i2v"
             ? fmt::format("set it to {}: the latents', 4 of a mask, the picture's", i2v)
             : std::string("set both to the channels of the latents, or variant = \"i2v\""));
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
  r.number("noise_range", d.noise_range, 0, 1,
           "Wan2.2: levels of noise, lowest and highest, that this model trains at: an expert's, "
           "such as [0.875, 1] (text) or [0.9, 1] (picture) for high noise.");
  r.number("first_frame", d.first_frame, 0, 1,
           "Wan, model.variant = \"ti2v\": share of the samples whose first latent frame is given, "
           "and is left out of the loss; the others learn from text alone.");
}

void check_diffusion(const Deck& deck, const DeckDemand& demand) {
  const std::vector<double>& range = deck.get<WanDiffusionDeck>().noise_range;
  demand(range.size() == 2 && range[0] < range[1],
         fmt::format("diffusion.noise_range = [{}]", fmt::join(range, ", ")),
         "give the lowest and the highest level, as [0.875, 1]");
  demand(deck.get<WanDiffusionDeck>().first_frame == 0 || deck.model.name != "wan" ||
             deck.get<WanDeck>().variant == "ti2v",
         fmt::format("diffusion.first_frame = {} with model.variant = \"{}\"",
                     deck.get<WanDiffusionDeck>().first_frame, deck.get<WanDeck>().variant),
         "set model.variant = \"ti2v\", or leave it out");
}

}  // namespace

WanConfig wan_config(const Deck& deck) {
  return {deck.get<WanDeck>(), deck.model.dtype, deck.model.recompute};
}

std::vector<DeckTable> wan_tables() {
  std::vector<DeckTable> tables = {deck_table("model", model_rows),
                                   deck_table("diffusion", diffusion_rows), wan_lora_table(),
                                   wan_adapters_table()};
  tables[0].check = check_model;
  tables[1].check = check_diffusion;
  for (DeckTable& t : tables) {
    t.next = t.section == "model" ? "model" : "train";
    t.fixed = true;
  }
  tables.push_back(sampler_table<WanSamplerDeck>());
  return tables;
}

namespace {

// A deck that is about the VAE alone may give its shape in [model] too.
void vae_rows(Rows& r, WanVaeDeck& d) {
  r.path("weights", d.weights,
         "Safetensors file, index or folder with Wan's VAE under the released names or those of "
         "diffusers; empty takes the newest checkpoint of run.dir.")
      .decides = false;
  r.text("variant", d.variant,
         "Wan's VAE: that of Wan2.1 (also of Wan2.2's 14B models), or that of Wan2.2's TI2V-5B, "
         "with shortcuts around its levels.",
         {"2.1", "2.2"})
      .alias = "model.variant";
  r.number("filters", d.filters, 1, 65536, "Channels of Wan's VAE at the frames' full size.")
      .alias = "model.filters";
  r.number("decoder_filters", d.decoder_filters, 0, 65536,
           "Channels of its decoder at the frames' full size; 0: filters.")
      .alias = "model.decoder_filters";
  r.number("patch_size", d.patch_size, 1, 2,
           "Wan's VAE: rows and columns of pixels that are channels of its input.")
      .alias = "model.patch_size";
  r.number("z_channels", d.z_channels, 1, 4096, "Channels of its latents.").alias =
      "model.z_channels";
  r.number("channel_multipliers", d.channel_multipliers, 1, 1024,
           "Channels of each level over filters.")
      .alias = "model.channel_multipliers";
  r.number("num_res_blocks", d.num_res_blocks, 1, 100,
           "Residual blocks at each level of the encoder; the decoder has one more.")
      .alias = "model.num_res_blocks";
  r.flag("temporal_downsample", d.temporal_downsample,
         "For each level but the last, whether the length is halved after it.")
      .alias = "model.temporal_downsample";
  Option& chunk = r.number(
      "chunk_latents", d.chunk_latents, 0, 100000,
      "Latent frames that are encoded or decoded at once, the same result for any number; 0 takes "
      "the whole clip, if memory allows.");
  chunk.decides = chunk.fixed = false;
  r.text("dtype", d.dtype, "Number format of its weights and activations.", {"f32", "bf16"});
}

void check_vae(const WanVaeDeck& v, const DeckDemand& demand) {
  demand(v.channel_multipliers.size() == v.temporal_downsample.size() + 1,
         fmt::format("vae.channel_multipliers has {} levels and vae.temporal_downsample {}",
                     v.channel_multipliers.size(), v.temporal_downsample.size()),
         "give temporal_downsample one entry fewer than there are levels");
  const auto known = std::ssize(wan_latents(v.variant).means);
  demand(v.z_channels == known,
         fmt::format("vae.z_channels = {} with vae.variant = \"{}\"", v.z_channels, v.variant),
         fmt::format("set it to {}: means and deviations of Wan's latents are known for these",
                     known));
  const std::vector<std::int64_t>& m = v.channel_multipliers;
  for (std::size_t i = 0; i + 1 < m.size(); ++i) {
    demand(v.variant == "2.2" || v.filters * m[i + 1] % 2 == 0,
           fmt::format("vae.filters = {} times vae.channel_multipliers[{}] = {} is odd", v.filters,
                       i + 1, m[i + 1]),
           "upsampling halves the channels: make the product even");
    const bool last = i + 2 == m.size();
    demand(v.variant == "2.1" || m[i + 1] == m[i] || (m[i + 1] == 2 * m[i] && !last),
           fmt::format("vae.channel_multipliers[{}] = {} behind {} with vae.variant = \"2.2\"",
                       i + 1, m[i + 1], m[i]),
           "take the same or, but at the last, its double: so a shortcut goes around each level");
  }
}

}  // namespace

std::vector<DeckTable> wan_vae_tables() {
  DeckTable table = deck_table("vae", vae_rows, check_vae);
  table.fixed = true;
  return {table};
}

}  // namespace weft
