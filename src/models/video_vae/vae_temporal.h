// The temporal VAE of Open-Sora 1.2, VAE_Temporal_SD (docs/models/video_vae.md, Temporal VAE;
// opensora/models/vae/vae_temporal.py at v1.2.0).
#pragma once

#include <string>
#include <vector>

#include "config/deck.h"
#include "models/video_vae/options.h"
#include "nn/conv.h"

namespace weft {

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
  // Of one chunk: frames / downsampling(), rounded up.
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
