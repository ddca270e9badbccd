// The 2D VAE: diffusers' AutoencoderKL in its SDXL shape (specs/vae.md 1; diffusers 0.27.2, autoencoder_kl.py), frame by frame.
#pragma once

#include <string>
#include <vector>

#include "core/deck.h"
#include "nn/conv.h"

namespace weft {

class SpatialVae {
 public:
  // Registers its parameters in `params`, their released names behind `prefix`.
  SpatialVae(const VaeDeck& config, ParameterTable& params, const std::string& prefix,
             bool trainable = true);

  // x [1,F,H,W,3] of F frames in [-1,1] -> moments [1,F,h,w,8]: mean and log variance, not clamped, not scaled.
  Var encode(nn::Context c, const Var& x) const;
  // z [1,F,h,w,4], not scaled -> [1,F,8h,8w,3], not clamped.
  Var decode(nn::Context c, const Var& z) const;

  // What latents are multiplied by behind encode and divided by before decode (specs/vae.md 0.1).
  static constexpr float scaling = 0.18215f;

 private:
  struct ResBlock {
    nn::NormWeights norm1, norm2;
    nn::ConvWeights conv1, conv2, shortcut;
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
  Side encoder_, decoder_;
  int groups_;
};

}  // namespace weft
