#pragma once

#include "nn/conv.h"

namespace weft::nn {

// 3x3 convolution (padding 1) of x and the levels, resized to x's height and width (bilinear),
// beside each other. x [N,1,H,W,C], level i [N,1,s,s,Ci], w.weight [out, C + sum Ci, 3, 3].
Var pyramid_conv(Context c, const Var& x, const std::vector<Var>& levels, const ConvWeights& w);

}  // namespace weft::nn
