// The linear layers of the networks that hear: so few rows that a library would divide the sums
// among its threads.
#pragma once

#include "models/resnet/folded_net.h"

namespace weft {

// A folded 1x1 convolution or linear layer whose results on the CPU do not depend on the number of
// threads (ops/matmul.h, packed weights). Its weights serve nothing else.
class Dense {
 public:
  Dense() = default;
  explicit Dense(const FoldedConv* conv) : conv_(conv) {}

  void pack() const;  // once, after FoldedNet::fold()
  // y [..., out] = leaky(x w^T + bias) of x [..., in] (convolve()).
  Tensor operator()(const Tensor& x, float slope = 1) const;

 private:
  const FoldedConv* conv_ = nullptr;
};

}  // namespace weft
