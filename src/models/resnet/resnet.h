// ResNet and ResNeXt without their classifier, to be trained or only run (He et al., arXiv
// 1512.03385; docs/models/segmentation.md, ResNet): names, strides and dilations as in the released
// models.
#pragma once

#include <array>

#include "models/resnet/conv_net.h"

namespace weft {

// relu(norms and convolutions of x + x): two 3x3 convolutions (basic), or 1x1, 3x3, 1x1
// (bottleneck). Where the size or the channels change, x passes a 1x1 convolution and a norm.
struct ResidualBlock {
  std::vector<const ConvLayer*> convs;
  const ConvLayer* downsample = nullptr;
  // Behind the 3x3 convolution, and x in front of `downsample`, are averaged over 2x2 squares.
  bool averages = false;
  Feature out() const { return convs.back()->out; }
};
// What the block at NAME is: NAME.conv1, .bn1 ..., NAME.downsample.0, .1; with average_down
// NAME.downsample.1, .2, and one in the first block of every layer.
struct ResidualShape {
  bool bottleneck = true;
  std::int64_t planes = 64;    // channels of the 3x3 convolutions
  std::int64_t expansion = 4;  // output channels over planes; 1 in basic blocks
  int stride = 1;
  int dilation = 1;           // of the 3x3 convolution that carries the stride,
  int later_dilation = 1;     // and of a basic block's second
  int groups = 1;             // of the 3x3 convolution of a bottleneck
  bool average_down = false;  // strides of bottlenecks by averages
  bool deformable = false;    // the 3x3 convolution of a bottleneck (nn/conv.h)
};
ResidualBlock add_residual_block(ConvNet& net, const std::string& name, const Feature& in,
                                 const ResidualShape& shape);
// Blocks that do not depend on each other, with as many convolutions each, one of xs for each:
// their norms share exchanges.
std::vector<Var> residual_blocks(nn::Context c, std::vector<Var> xs,
                                 const std::vector<const ResidualBlock*>& blocks,
                                 nn::BatchNormGroup& group);
Var residual_block(nn::Context c, Var x, const ResidualBlock& block, nn::BatchNormGroup& group);

struct ResNetShape {
  std::array<int, 4> blocks = {3, 4, 6, 3};
  bool bottleneck = true;
  std::int64_t planes = 64;    // of layer1; twice as many in each that follows
  std::int64_t expansion = 4;  // 1 in basic blocks
  int groups = 1;
  // Channels of the stem: 3x3 convolutions, the first of stride 2; a single one is 7x7.
  std::vector<std::int64_t> stem = {64, 64, 128};
  int output_stride = 32;  // or 16, 8: the last one or two layers are dilated instead
  // As CLIP's: averages in place of strides and of max pooling, and the stem's names are those of a
  // Sequential (stem.0, stem.1; stem.3 ...). Bottlenecks, output stride 32.
  bool clip = false;
  bool deformable = false;  // the 3x3 convolutions of layer2 to layer4 (bottlenecks)
};

// What makes feature maps of an image.
class FeatureNet {
 public:
  virtual ~FeatureNet() = default;
  virtual std::vector<Feature> features() const = 0;
  virtual std::int64_t blocks() const = 0;
  // image [N,1,H,W,3] -> features() of it. The first `recomputed` of blocks() keep only their
  // inputs.
  virtual std::vector<Var> forward(nn::Context c, const Var& image, nn::BatchNormGroup& group,
                                   std::int64_t recomputed) const = 0;
};

// Its features are the maps of layer1 to layer4.
class ResNet : public FeatureNet {
 public:
  ResNet(ConvNet& net, const ResNetShape& shape);

  std::vector<Feature> features() const override;
  std::int64_t blocks() const override;
  const std::array<std::vector<ResidualBlock>, 4>& layers() const { return layers_; }
  std::vector<Var> forward(nn::Context c, const Var& image, nn::BatchNormGroup& group,
                           std::int64_t recomputed) const override;
  // The same once the network is folded (ConvNet::fold).
  std::vector<Tensor> forward(const Tensor& image) const;

 private:
  bool clip_;
  std::vector<const ConvLayer*> stem_;
  std::array<std::vector<ResidualBlock>, 4> layers_;
};

}  // namespace weft
