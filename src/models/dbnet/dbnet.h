// Text detection by differentiable binarization: DBNet and DBNet++ under the names of mmocr's
// released files (docs/models/dbnet.md).
#pragma once

#include <array>
#include <memory>
#include <optional>
#include <vector>

#include "models/dbnet/options.h"
#include "models/resnet/resnet.h"

namespace weft {

class Dbnet {
 public:
  // `deformable`: the 3x3 convolutions of layer2 to layer4 are DCNv2. The table holds all that
  // released files have, also what only training uses.
  Dbnet(const DbnetDeck& deck, bool deformable);

  ParameterTable& params() { return *params_; }
  const ParameterTable& params() const { return *params_; }

  // Sides of pictures are multiples of this.
  static constexpr int stride = 32;

  struct Maps {
    Var probability;  // logits [N,1,H,W,1]
    Var threshold;    // logits likewise; null unless wanted
  };
  // image [N,1,H,W,3], normalised -> maps. The first `recomputed` of blocks() keep only their
  // inputs.
  Maps forward(nn::Context c, const Var& image, nn::BatchNormGroup& group, bool want_threshold,
               std::int64_t recomputed = 0) const;
  std::int64_t blocks() const;

  // Multiplies the weights of the 3x3 convolutions of layer2 to layer4, once they are loaded.
  void scale_conv2(float gain);

  // Of a forward of one picture, two a multiply-add.
  double flops(std::int64_t height, std::int64_t width, bool with_threshold = false) const;

 private:
  struct Head {
    ConvNorm conv;
    nn::ConvWeights up, out;
    nn::BatchNorm up_norm;
  };
  std::unique_ptr<ParameterTable> params_;
  std::unique_ptr<ConvNet> backbone_layers_, neck_layers_, head_layers_;
};

}  // namespace weft
