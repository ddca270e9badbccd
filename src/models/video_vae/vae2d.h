// The 2D VAE: diffusers' AutoencoderKL in its SDXL shape (docs/models/video_vae.md, Spatial VAE;
// diffusers 0.27.2, autoencoder_kl.py), frame by frame.
#pragma once

#include <string>
#include <vector>

#include "config/deck.h"
#include "models/video_vae/options.h"
#include "nn/conv.h"

namespace weft {

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

}  // namespace weft
