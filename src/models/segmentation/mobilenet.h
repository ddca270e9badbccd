// MobileNetV2 without its last convolution and classifier, dilated to an output stride of 8
// (Sandler et al., arXiv 1801.04381; docs/models/segmentation.md, MobileNetV2).
#pragma once

#include "models/resnet/conv_net.h"

namespace weft {

class MobileNet {
 public:
  explicit MobileNet(ConvNet& net);

  std::vector<Feature> features() const;
  std::int64_t blocks() const { return static_cast<std::int64_t>(blocks_.size()); }
  // image [N,1,H,W,3] -> the maps behind blocks 2, 4, 7, 14 and 17. The first `recomputed` blocks
  // keep only their inputs.
  std::vector<Var> forward(nn::Context c, const Var& image, nn::BatchNormGroup& group,
                           std::int64_t recomputed = 0) const;

 private:
  struct Block {
    std::vector<ConvNorm> convs;  // expansion (none in the first block), depthwise, projection
    bool residual = false;
  };
  static Var run(nn::Context c, const Var& x, const Block& block, nn::BatchNormGroup& group);

  ConvNorm stem_;
  std::vector<Block> blocks_;
};

}  // namespace weft
