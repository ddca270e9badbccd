// The 3x3 convolution that joins a pyramid of pooled grids to the activations that they were pooled
// from (the head of PSPNet and UPerNet), without the joined activations.
#pragma once

#include <vector>

#include "nn/conv.h"

namespace weft::nn {

// conv 3x3 (padding 1, no bias) of x [N,1,H,W,C] and all levels [N,1,s,s,Ci], each resized to H x W
// (bilinear, align_corners=False), joined over channels in this order; w.weight [out, C + sum Ci,
// 3, 3]. Returns [N,1,H,W,out] of x's type.
//
// Neither the resized levels nor the concatenation exists: a resized grid is a sum over its cells,
// so its convolution is A Z, where Z holds, for each cell and each of the 9 taps, the tap's weights
// times the cell's channels, and A, a function of the sizes alone, what cells weigh in shifted
// pixels (ops/conv/pyramid.h). With 4 levels of 512 channels and x of 2048, half of the products
// and of the memory. In bf16, A and Z are rounded to it.
Var pyramid_conv(Context c, const Var& x, const std::vector<Var>& levels, const ConvWeights& w);

}  // namespace weft::nn
