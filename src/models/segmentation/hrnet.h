// HRNetV2-W48 (Sun et al., arXiv 1904.04514; docs/models/segmentation.md, HRNet): branches at 1/4,
// 1/8, 1/16 and 1/32 of the image side by side, which exchange what they found after every module.
#pragma once

#include "models/resnet/resnet.h"

namespace weft {

class HrNet {
 public:
  explicit HrNet(ConvNet& net);

  std::vector<Feature> features() const { return {out_}; }
  // Rows of blocks: block b of every branch of a module.
  std::int64_t blocks() const;
  // image [N,1,H,W,3] -> all branches at 1/4, one map of 720 channels. The first `recomputed` rows
  // keep only their inputs.
  std::vector<Var> forward(nn::Context c, const Var& image, nn::BatchNormGroup& group,
                           std::int64_t recomputed = 0) const;

 private:
  using Chain = std::vector<ConvNorm>;  // each but the last followed by ReLU
  struct Module {
    std::vector<std::vector<ResidualBlock>> rows;  // [block][branch]
    std::vector<std::vector<Chain>> fuse;          // [to][from]; none where to = from
  };
  struct Stage {
    std::vector<std::optional<ConvNorm>> transition;  // into each branch, from the one before or
                                                      // the last; none: the branch goes on
    std::vector<Module> modules;
  };
  static Module add_module(ConvNet& net, const std::string& name,
                           const std::vector<Feature>& branches);
  static std::vector<Var> fuse(nn::Context c, const std::vector<Var>& x, const Module& module,
                               nn::BatchNormGroup& group);

  std::vector<ConvNorm> stem_;
  std::vector<ResidualBlock> layer1_;
  std::vector<Stage> stages_;
  Feature out_;
};

}  // namespace weft
