// The two networks of Open-Sora's VAE v1.2. The 2D VAE works frame by frame: diffusers'
// AutoencoderKL in its SDXL shape (docs/models/video_vae.md, Spatial VAE; diffusers 0.27.2,
// autoencoder_kl.py). The temporal one works on its latents: VAE_Temporal_SD
// (docs/models/video_vae.md, Temporal VAE; opensora/models/vae/vae_temporal.py at v1.2.0).
#pragma once

#include <string>
#include <vector>

#include "config/deck.h"
#include "models/video_vae/options.h"
#include "nn/conv.h"

namespace weft {

// Frame by frame.
class SpatialVae {
 public:
  // Registers its parameters in `params`, their released names behind `prefix`.
  SpatialVae(const VaeDeck& config, ParameterTable& params, const std::string& prefix,
             bool trainable = true);

  // x [B,T,H,W,3] in [-1,1], each frame by itself -> moments [B,T,h,w,8]: mean and log variance,
  // not clamped, not scaled; h = H / pixels_a_latent(), rounded down.
  Var encode(nn::Context c, const Var& x) const;
  // z [B,T,h,w,4], not scaled -> [B,T,8h,8w,3], not clamped.
  Var decode(nn::Context c, const Var& z) const;

  // 8 with the released shape.
  std::int64_t pixels_a_latent() const;

  // What latents are multiplied by behind encode and divided by before decode
  // (docs/models/video_vae.md, Scaling and normalisation).
  static constexpr float scaling = 0.18215f;
  static constexpr std::int64_t latent_channels = 4;

 private:
  struct ResBlock {
    nn::NormWeights norm1, norm2;
    nn::ConvWeights conv1, conv2, shortcut;  // shortcut where the channels change
  };
  struct Attention {
    nn::NormWeights norm;
    nn::Linear q, k, v, out;
  };
  struct Mid {
    ResBlock first, second;
    Attention attention;
  };
  struct Level {
    std::vector<ResBlock> blocks;
    nn::ConvWeights resample;  // none behind the last
  };
  struct Side {
    nn::ConvWeights in, out, quant;
    nn::NormWeights norm;
    Mid mid;
    std::vector<Level> levels;  // in the order of the forward pass
  };

  // Registration, in the order of the forward pass.
  class Builder;

  Var res_block(nn::Context c, Var x, const ResBlock& b) const;
  Var attention(nn::Context c, const Var& x, const Attention& a) const;
  Var middle(nn::Context c, Var x, const Mid& mid) const;

  Side encoder_, decoder_;
  int groups_;
};

// On the latents of a chunk of frames.
class TemporalVae {
 public:
  // Registers its parameters in `params`, their released names behind `prefix`.
  TemporalVae(const VaeDeck& config, ParameterTable& params, const std::string& prefix);

  // x [B,T,h,w,4], the scaled latents of one chunk, any T: zero frames are put in front up to a
  // multiple of downsampling() -> moments [B,latent_frames(T),h,w,8]: mean and log variance, not
  // clamped.
  Var encode(nn::Context c, const Var& x) const;
  // z [B,t,h,w,4] -> [B,frames,h,w,4]: the first frames, which answer to padding, are dropped.
  // `last_input`, if given, gets the input of the last layer, a Conv::causal(3) whose weight is
  // last_layer().
  Var decode(nn::Context c, const Var& z, std::int64_t frames, Var* last_input = nullptr) const;

  // Frames to a latent frame: 4 in the released model.
  std::int64_t downsampling() const { return downsampling_; }
  // The latent frames of one chunk: frames / downsampling(), rounded up.
  std::int64_t latent_frames(std::int64_t frames) const {
    return (frames + downsampling_ - 1) / downsampling_;
  }
  static constexpr std::int64_t latent_channels = 4;
  // The last weight of the decoder: what an adversarial loss measures its gradients at
  // (docs/models/video_vae.md, Losses).
  Parameter& last_layer() const { return *decoder_.out.weight; }

 private:
  struct ResBlock {
    nn::NormWeights norm1, norm2;
    nn::ConvWeights conv1, conv2, conv3;  // conv3 where the channels change
  };
  struct Level {
    std::vector<ResBlock> blocks;
    nn::ConvWeights resample;  // behind it in the forward pass, or none
  };
  struct Side {
    nn::ConvWeights in, out, quant;
    nn::NormWeights norm;
    std::vector<ResBlock> mid;
    std::vector<Level> levels;  // in the order of the forward pass
  };

  // Registration, in the order of the forward pass.
  class Builder;

  Var res_block(nn::Context c, Var x, const ResBlock& b) const;

  Side encoder_, decoder_;
  std::int64_t downsampling_ = 1;
  int groups_;
};

}  // namespace weft
