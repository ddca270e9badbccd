// SadTalker's keypoint detector: where in space the points of a face are, apart from its pose and
// expression (docs/models/sadtalker.md).
#pragma once

#include "models/resnet/folded_net.h"
#include "models/sadtalker/options.h"

namespace weft {

class KeypointNet {
 public:
  // Registers kp_extractor.*. Exit::usage if the deck's sizes contradict each other.
  explicit KeypointNet(const SadtalkerDeck& deck);

  ParameterTable& params() { return table_; }
  void fold() { net_.fold(); }  // once the table is loaded

  // Sides of pictures are multiples of this.
  std::int64_t stride() const;

  // f32 [N,K,3], x, y, z in -1 to 1, of pictures f32 [N,1,H,W,3] in 0 to 1.
  Tensor forward(const Tensor& image) const;

 private:
  std::int64_t every_, depth_, num_kp_;
  float temperature_;
  ParameterTable table_;
  FoldedNet net_;
  const FoldedConv *smooth_ = nullptr, *to_depth_, *logits_;
  std::vector<const FoldedConv*> down_, up_;
};

}  // namespace weft
