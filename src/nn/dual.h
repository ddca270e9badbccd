// Values with their tangents (forward-mode differentiation): the derivative of a discriminator's
// layers along a direction at its input. Both are on the tape, so that this derivative can itself
// be differentiated (gradient penalties).
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

// Overwrites both tensors of x: nothing else may need their values.
Dual leaky_relu(Context c, const Dual& x, float slope);

}  // namespace weft::nn
