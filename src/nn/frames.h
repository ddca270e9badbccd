// Differentiable operations on frames [1,T,H,W,C] and of convolutional critics: VGG16 for LPIPS, the PatchGAN.
#pragma once

#include <vector>

#include "nn/nn.h"

namespace weft::nn {

// x where it is above 0, else slope * x; slope 0 is ReLU. Takes x's memory: nothing else may need its value.
Var leaky_relu(Context c, const Var& x, float slope);

// Greatest of each 2x2 rectangle: [N,T,H,W,C] -> [N,T,H/2,W/2,C].
Var max_pool(Context c, const Var& x);

// Frames one behind the other: pieces [1,t,H,W,C] -> [1,sum t,H,W,C].
Var join_frames(Context c, const std::vector<Var>& pieces);

// Frames [first, first + count) of x [1,T,H,W,C]: the same memory.
Tensor frames_of(const Tensor& x, std::int64_t first, std::int64_t count);

}  // namespace weft::nn
