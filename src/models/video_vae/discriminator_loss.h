// What the discriminator of a VAE's training learns from one clip (opensora/models/vae/losses.py at
// v1.2.0, DiscriminatorLoss): half the loss of real and of fake frames each, LeCam, and the penalty
// on its gradient at the real frames. The original computes the last two in no training script;
// they are as its loss defines them, with LeCam's averages as its LeCamEMA.
#pragma once

#include "config/deck.h"
#include "models/video_vae/options.h"
#include "models/video_vae/patch_gan.h"

namespace weft {

class DiscriminatorLoss {
 public:
  // `gan` and its table outlive it. Once the device is chosen: it keeps the averages there.
  DiscriminatorLoss(const VaeTrainDeck& deck, PatchGan& gan, ParameterTable& params);

  // f32 [1] each, to be added to; the means of the logits are zero before.
  struct Sums {
    Tensor loss, lecam, penalty, real, fake;
  };
  // Frames [1,T,H,W,3]. `weight` times the gradient of loss + lecam + penalty is in the table
  // afterwards.
  void learn(const Tensor& real, const Tensor& fake, float weight, Sums sums) const;

  // LeCam's running averages of the mean logits of real and of fake frames, f32 [2]: part of a
  // run's state.
  Tensor& averages() { return averages_; }
  static constexpr float decay = 0.999f;

 private:
  void judge(const Var& logits, bool real, float weight, Sums& sums) const;
  Tensor penalise(const Tensor& real, float weight, Tensor& sum) const;

  const VaeTrainDeck& deck_;
  PatchGan& gan_;
  ParameterTable& params_;
  Tensor averages_;
};

}  // namespace weft
