#include "models/video_vae/options.h"

#include "config/deck_table.h"

namespace weft {
namespace {

// A deck that is about the VAE alone may give the shape of the temporal one in [model] too.
void vae_rows(Rows& r, VaeDeck& d) {
  r.path(
       "weights", d.weights,
       "Safetensors file, index or folder with the VAE under the released names; empty draws it at "
       "random (training) or takes the newest checkpoint of run.dir.")
      .decides = false;
  r.number("spatial_channels", d.spatial_channels, 1, 65536,
           "Channels of the 2D VAE at full, half, quarter ... size; the last two alike in the "
           "released one.");
  r.number("spatial_res_blocks", d.spatial_res_blocks, 1, 100,
           "Residual blocks at each size of the 2D encoder; the decoder has one more.");
  r.number("spatial_groups", d.spatial_groups, 1, 65536, "Groups of its GroupNorm.");
  r.number("filters", d.filters, 1, 65536, "Channels of the temporal VAE at its full length.")
      .alias = "model.filters";
  r.number("num_res_blocks", d.num_res_blocks, 1, 100, "Residual blocks at each of its levels.")
      .alias = "model.num_res_blocks";
  r.number("channel_multipliers", d.channel_multipliers, 1, 1024,
           "Channels of each level over filters.")
      .alias = "model.channel_multipliers";
  r.flag("temporal_downsample", d.temporal_downsample,
         "For each level but the last, whether the length is halved after it.")
      .alias = "model.temporal_downsample";
  r.number("num_groups", d.num_groups, 1, 65536, "Groups of its GroupNorm.").alias =
      "model.num_groups";
  r.number("micro_frame_size", d.micro_frame_size, 0, 100000,
           "Frames that the temporal VAE takes at once, each chunk by itself; 0 takes all.");
  r.number("micro_batch_size", d.micro_batch_size, 0, 100000,
           "Frames that the 2D VAE takes at once; 0 takes as many as memory allows.")
      .decides = false;
  r.number(
      "scale", d.scale, 1e-6, 1e6,
      "Deviation of each latent channel, which is divided by; empty, with shift: `weft encode` "
      "measures both.");
  r.number("shift", d.shift, -1e6, 1e6, "Mean of each latent channel, which is subtracted.");
  r.text("dtype", d.dtype, "Number format of its weights and activations.", {"f32", "bf16"});
}

void check_vae(const VaeDeck& v, const DeckDemand& demand) {
  demand(v.channel_multipliers.size() == v.temporal_downsample.size() + 1,
         fmt::format("vae.channel_multipliers has {} levels and vae.temporal_downsample {}",
                     v.channel_multipliers.size(), v.temporal_downsample.size()),
         "give temporal_downsample one entry fewer than there are levels");
  demand(!v.spatial_channels.empty(), "vae.spatial_channels is empty", "give one or more");
  demand((v.scale.size() == 4 && v.shift.size() == 4) || (v.scale.empty() && v.shift.empty()),
         fmt::format("vae.scale has {} and vae.shift {} numbers", v.scale.size(), v.shift.size()),
         "give four of each, one a latent channel, or none for `weft encode` to measure them");
}

void vae_train_rows(Rows& r, VaeTrainDeck& d) {
  r.flag("freeze_spatial", d.freeze_spatial, "Train the temporal VAE alone.");
  r.flag("pixel_loss", d.pixel_loss,
         "Train for the pixels: L1, LPIPS and KL divergence (stage 3).");
  r.flag("latent_loss", d.latent_loss,
         "Loss on the 2D latents reconstructed by the temporal VAE (stages 1 and 2).");
  r.flag("identity_loss", d.identity_loss,
         "Hold latents of single frames to the 2D latents (stage 1).");
  r.number("image_share", d.image_share, 0, 1,
           "Share of the samples that train with their first frame alone.");
  r.flag("random_length", d.random_length,
         "Train with the first frames of each clip, as many as are drawn from 1 to all.");
  r.number("perceptual_weight", d.perceptual_weight, 0, 1e6, "Weight of LPIPS.");
  r.number("kl_weight", d.kl_weight, 0, 1e6, "Weight of the KL divergence.");
  r.path(
      "lpips_weights", d.lpips_weights,
      "Safetensors file with VGG16 and LPIPS's own weights; empty leaves LPIPS out, and says so.");
  r.text("discriminator", d.discriminator,
         "Adversarial loss against a PatchGAN; the released model was trained with none.",
         {"none", "patchgan"});
  r.text("discriminator_loss", d.discriminator_loss, "Loss of the discriminator.",
         {"hinge", "vanilla", "non-saturating"});
  r.number("discriminator_weight", d.discriminator_weight, 0, 1e6,
           "Factor of the adversarial loss, multiplied by its adaptive weight.");
  r.number("discriminator_start", d.discriminator_start, 0, many,
           "First step with the adversarial loss.");
  r.number("discriminator_lr", d.discriminator_lr, 0, 1e3, "Learning rate of the discriminator.");
  r.number("lecam_weight", d.lecam_weight, 0, 1e6,
           "Factor of the LeCam regularisation of the discriminator; 0 leaves it out.");
  r.number("gradient_penalty_weight", d.gradient_penalty_weight, 0, 1e6,
           "Factor of the discriminator's gradient penalty; 0 leaves it out.");
}

}  // namespace

std::vector<DeckTable> video_vae_tables() {
  std::vector<DeckTable> tables = {deck_table("vae", vae_rows, check_vae),
                                   deck_table("vae_train", vae_train_rows)};
  for (DeckTable& t : tables) t.fixed = true;
  return tables;
}

}  // namespace weft
