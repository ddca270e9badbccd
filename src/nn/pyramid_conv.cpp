#include "nn/pyramid_conv.h"

#include "nn/image_ops.h"

namespace weft::nn {

Var pyramid_conv(Context c, const Var& x, const std::vector<Var>& levels, const ConvWeights& w) {
  std::vector<Var> pieces{x};
  for (const Var& l : levels)
    pieces.push_back(resize_bilinear(c, l, x->value.dim(2), x->value.dim(3)));
  return conv(c, join_channels(c, pieces), w, ops::Conv::same(3));
}

}  // namespace weft::nn
