// The VAE's tables of the deck: [vae] and [vae_train].
#pragma once

#include "config/deck.h"

namespace weft {

// Shape of Open-Sora's VAE (docs/models/video_vae.md, Spatial VAE, Temporal VAE) and how it is run.
// The released one is the default.
struct VaeDeck {
  std::string weights;
  std::vector<std::int64_t> spatial_channels = {128, 256, 512, 512};
  std::int64_t spatial_res_blocks = 2;
  std::int64_t spatial_groups = 32;
  std::int64_t filters = 128;
  std::int64_t num_res_blocks = 4;
  std::vector<std::int64_t> channel_multipliers = {1, 2, 2, 4};
  std::vector<bool> temporal_downsample = {false, true, true};
  std::int64_t num_groups = 32;
  std::int64_t micro_frame_size = 17;
  std::int64_t micro_batch_size = 4;
  std::vector<double> scale = {3.85, 2.32, 2.33, 3.06};
  std::vector<double> shift = {-0.10, 0.34, 0.27, 0.98};
  std::string dtype = "f32";
};
// What a VAE is trained for (docs/models/video_vae.md, Losses, Training stages). The defaults are
// stage 3's.
struct VaeTrainDeck {
  bool freeze_spatial = false;
  bool pixel_loss = true;
  bool latent_loss = false;
  bool identity_loss = false;
  double image_share = 0;
  bool random_length = true;
  double perceptual_weight = 0.1;
  double kl_weight = 1e-6;
  std::string lpips_weights;
  std::string discriminator = "none";
  std::string discriminator_loss = "hinge";
  double discriminator_weight = 0.5;
  std::int64_t discriminator_start = 50001;
  double discriminator_lr = 1e-5;
  double lecam_weight = 0;
  double gradient_penalty_weight = 0;
};

std::vector<DeckTable> video_vae_tables();

}  // namespace weft
