// ParseNet: which part of a face each pixel of an aligned face is (docs/models/gfpgan.md, ParseNet;
// arXiv:2009.08709), under the names of the released parsing_parsenet.pth.
#pragma once

#include <memory>
#include <vector>

#include "checkpoint/model_source.h"
#include "models/resnet/folded_net.h"
#include "nn/parameters.h"
#include "tensor/tensor.h"

namespace weft {

// Files also hold the layer that paints the face again, and counts of batches; neither is read.
WeightNames parse_net_names();

class ParseNet {
 public:
  static constexpr std::int64_t classes = 19, multiple = 16;

  // Channels of the first layer; the deepest has four times as many. The released network has 64.
  explicit ParseNet(std::int64_t channels = 64);

  ParameterTable& params() { return *params_; }
  // Once, after the table is loaded or drawn. Exit::data if a value is not possible.
  void fold() { net_->fold(); }

  // Logits [1,1,H,W,19] of an image [1,1,H,W,3] in [-1, 1], of the weights' type; H and W are
  // multiples of `multiple`, 32 at the least.
  Tensor logits(const Tensor& image) const;
  // The greatest's number, u8 [H,W]; the first of equal ones.
  Tensor parse(const Tensor& image) const;
  // Multiply-adds of an image.
  double multiply_adds(std::int64_t height, std::int64_t width) const;

 private:
  struct Block {
    int up = 1;                            // the frame is seen at twice its size first
    const FoldedConv* shortcut = nullptr;  // none: the frame itself
    const FoldedConv *first = nullptr, *second = nullptr;
  };
  Block add_block(const std::string& name, std::int64_t in, std::int64_t out, int down, int up);
  Tensor run(const Block& block, const Tensor& x) const;

  std::unique_ptr<ParameterTable> params_;
  std::unique_ptr<FoldedNet> net_;
  const FoldedConv *stem_, *head_;
  std::vector<Block> encoder_, body_, decoder_;
};

}  // namespace weft
