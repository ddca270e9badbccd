// A 3x3 convolution of a map that is seen nearest at four times its size: in each square of 4x4
// pixels it has nine different values, each of which is a convolution of the map itself
// (ops/layout.h, spread_4x4). Nine products of small maps instead of sixteen, and of 25 taps of
// their 81 instead of 144.
#pragma once

#include "models/resnet/folded_net.h"

namespace weft {

class Quadruple {
 public:
  // `conv`: 3x3, of stride 1, padded to keep the size; owned by the net that it was added to.
  explicit Quadruple(const FoldedConv* conv) : conv_(conv) {}

  void fold();  // once that net is folded: sums its weights

  // leaky(conv(x seen at four times its size)), as convolve(): [N,1,4h,4w,out] of x [N,1,h,w,in].
  Tensor forward(const Tensor& x, float slope) const;

 private:
  const FoldedConv* conv_;
  FoldedConv nine_;  // [9 out, in, 3, 3]
};

}  // namespace weft
