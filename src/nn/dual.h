// Values with their tangents, which is forward-mode differentiation: what the layers of a
// discriminator make of a direction at its input. Both are on the tape, so the derivative along
// that direction is differentiated in its turn (gradient penalties).
#pragma once

#include "nn/conv.h"

namespace weft::nn {

struct Dual {
  Var value, tangent;  // of one shape and type
};

// Without a residual.
Dual conv(Context c, const Dual& x, const ConvWeights& w, ops::Conv geometry);

// A norm for each channel over all positions of one sample, by their own statistics.
Dual batch_norm(Context c, const Dual& x, const NormWeights& w, float eps);

// Takes both memories of x: nothing else may need its values.
Dual leaky_relu(Context c, const Dual& x, float slope);

}  // namespace weft::nn
