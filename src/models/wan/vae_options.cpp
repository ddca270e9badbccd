#include "models/wan/vae_options.h"

#include "config/deck_table.h"
#include "models/wan/vae_networks.h"

namespace weft {
namespace {

// A deck that is about the VAE alone may give its shape in [model] too.
void vae_rows(Rows& r, WanVaeDeck& d) {
  r.path("weights", d.weights,
         "Safetensors file, index or folder with Wan's VAE under the released names or those of "
         "diffusers; empty takes the newest checkpoint of run.dir.")
      .decides = false;
  r.number("filters", d.filters, 1, 65536, "Channels of Wan's VAE at the frames' full size.")
      .alias = "model.filters";
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
  demand(v.z_channels == CausalVae::latent_channels,
         fmt::format("vae.z_channels = {}", v.z_channels),
         fmt::format("set it to {}: means and deviations of Wan's latents are known for these",
                     CausalVae::latent_channels));
  for (std::size_t i = 0; i + 1 < v.channel_multipliers.size(); ++i)
    demand(v.filters * v.channel_multipliers[i + 1] % 2 == 0,
           fmt::format("vae.filters = {} times vae.channel_multipliers[{}] = {} is odd", v.filters,
                       i + 1, v.channel_multipliers[i + 1]),
           "upsampling halves the channels: make the product even");
}

}  // namespace

std::vector<DeckTable> wan_vae_tables() {
  DeckTable table = deck_table("vae", vae_rows, check_vae);
  table.fixed = true;
  return {table};
}

}  // namespace weft
