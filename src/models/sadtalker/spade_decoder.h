// The decoder of SadTalker's generator: from the warped features to a picture, by residual blocks
// whose norms take scale and shift from these features (SPADE; docs/models/sadtalker.md). Its sizes
// are fixed.
#pragma once

#include <array>

#include "models/resnet/folded_net.h"

namespace weft {

class SpadeDecoder {
 public:
  // Registers decoder.* behind the net's prefix.
  explicit SpadeDecoder(FoldedNet& net);

  static constexpr std::int64_t in = 256;  // channels

  // Logits [N,1,4h,4w,3] of a picture from features [N,1,h,w,256].
  Tensor forward(const Tensor& features) const;

 private:
  struct Norm {
    const FoldedConv *shared, *gamma_beta;
  };
  struct Block {
    Norm norm_0, norm_1, norm_s;
    const FoldedConv *conv_0, *conv_1, *conv_s = nullptr;  // conv_s: of a shortcut that has one
    bool upsample = false;                                 // x is seen at twice its size
  };
  static Block add(FoldedNet& net, const std::string& name, std::int64_t in, std::int64_t out,
                   bool upsample);
  // `features`: at the size of x or, where the block doubles that, before the doubling.
  static Tensor run(const Block& block, const Tensor& x, const Tensor& features, float slope);

  const FoldedConv *first_, *picture_;
  std::array<Block, 6> middle_;
  std::array<Block, 2> up_;
};

}  // namespace weft
