// The PatchGAN discriminator of Open-Sora's VAE training (opensora/models/vae/discriminator.py at
// v1.2.0, NLayerDiscriminator with three layers, which is pix2pix's and VQGAN's): frame by frame a
// map of logits, one for each patch of 70x70 pixels. Its BatchNorm normalises by the statistics of
// the frames that it is given, as in training; running averages, which training does not read, are
// not kept. Weights start normal with deviation 0.02, BatchNorm's at 1 (there: 1 +- 0.02).
#pragma once

#include <vector>

#include "nn/conv.h"

namespace weft {

class PatchGan {
 public:
  // Registers its parameters behind `prefix`, in group 1 of the table (nn/parameters.h): they have
  // an optimizer of their own.
  PatchGan(ParameterTable& params, const std::string& prefix);

  // frames [1,F,H,W,3] in [-1,1], H and W at least least_size -> logits [1,F,h,w,1].
  Var forward(nn::Context c, const Var& frames) const;
  // The same with the logits' tangents along a direction at the frames.
  nn::Dual forward(nn::Context c, const nn::Dual& frames) const;
  static constexpr std::int64_t least_size = 24;

  // What its parameters' names begin with.
  const std::string& prefix() const { return prefix_; }

 private:
  struct Layer {
    nn::ConvWeights conv;
    nn::NormWeights norm;  // none in the first and the last
    int stride = 1;
  };
  template <class X>
  X through_layers(nn::Context c, X x) const;

  std::string prefix_;
  std::vector<Layer> layers_;
};

}  // namespace weft
