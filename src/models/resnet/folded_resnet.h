// torchvision's ResNet-50 with its norms folded in, for networks that are only run.
#pragma once

#include <array>
#include <optional>
#include <vector>

#include "models/resnet/folded_net.h"

namespace weft {

class FoldedResNet50 {
 public:
  // Registers conv1, bn1, layer1 to layer4 behind net.prefix; strides are in the 3x3 convolutions.
  explicit FoldedResNet50(FoldedNet& net);

  // x [N,1,H,W,3] -> the maps of layer1 to layer4, 4, 8, 16 and 32 pixels apart with 256, 512, 1024
  // and 2048 channels. Those before `first` are not kept (undefined), to save memory.
  std::array<Tensor, 4> forward(const Tensor& x, int first = 0) const;

 private:
  struct Block {
    std::array<const FoldedConv*, 3> convs{};
    const FoldedConv* shortcut = nullptr;
  };
  const FoldedConv* stem_;
  std::array<std::vector<Block>, 4> layers_;
};

}  // namespace weft
