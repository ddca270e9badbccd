// Differentiable operations on a VAE's moments and latents, channels last: [B,T,H,W,C].
#pragma once

#include "nn/nn.h"
#include "ops/dispatch.h"

namespace weft::nn {

// z [...,C] of the moments' type, drawn from moments [...,2C] (ops/posterior.h); eps f32 [...,C], undefined for the mean;
// affine f32 [2,C] or undefined.
Var posterior_draw(Context c, const Var& moments, const Tensor& eps, const Tensor& affine);

// Moments with the log variance clamped to [-30, 20].
Var clamp_log_variance(Context c, const Var& moments);

// x * a[c] + b[c], affine f32 [2,C] = (a, b).
Var channel_affine(Context c, const Var& x, const Tensor& affine);

// Frames [first, T) of x [B,T,H,W,C].
Var drop_frames(Context c, const Var& x, std::int64_t first);
// `count` frames of zeros and x behind them: [B,count+T,H,W,C].
Var pad_frames(Context c, const Var& x, std::int64_t count);

}  // namespace weft::nn
