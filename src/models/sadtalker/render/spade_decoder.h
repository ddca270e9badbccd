// The decoder of SadTalker's generator: from the warped features to a picture, by residual blocks
// whose norms take scale and shift from these features (SPADE; docs/models/sadtalker.md). Its sizes
// are fixed.
#pragma once

#include <array>
#include <optional>
#include <string>

#include "models/resnet/folded_net.h"
#include "models/sadtalker/render/quadruple.h"

namespace weft {

class SpadeDecoder {
 public:
  // Registers decoder.* behind the net's prefix.
  explicit SpadeDecoder(FoldedNet& net);

  static constexpr std::int64_t in = 256;  // channels

  void fold();  // once the net is folded

  // Logits [N,1,4h,4w,3] of a picture from features [N,1,h,w,256].
  Tensor forward(const Tensor& features) const;

 private:
  struct Norm {
    const FoldedConv *shared, *gamma_beta;
    std::optional<Quadruple>
        quadruple;  // `shared` of features that are seen at four times their size
  };
  struct Block {
    Norm norm_0, norm_1, norm_s;
    const FoldedConv *conv_0, *conv_1, *conv_s = nullptr;  // conv_s: of a shortcut that has one
    bool upsample = false;                                 // x is seen at twice its size
  };
  // `scale`: of the block's maps to the features, 1, 2 or 4; 2 and 4 are twice the size of x.
  static Block add(FoldedNet& net, const std::string& name, std::int64_t in, std::int64_t out,
                   int scale);
  static Tensor run(const Block& block, const Tensor& x, const Tensor& features, float slope);

  const FoldedConv *first_, *picture_;
  std::array<Block, 6> middle_;
  std::array<Block, 2> up_;
};

}  // namespace weft
