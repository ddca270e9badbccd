// Differentiable operations of convolutional models, over channels-last activations [N,T,H,W,C].
#pragma once

#include "nn/nn.h"
#include "ops/conv.h"

namespace weft::nn {

struct ConvWeights {
  Parameter* weight = nullptr;  // [out, in, kt, kh, kw] or [out, in, kh, kw]
  Parameter* bias = nullptr;    // [out], or none
};
struct NormWeights {
  Parameter *weight = nullptr, *bias = nullptr;  // [C]
};

// conv(x) + bias (+ residual).
Var conv(Context c, const Var& x, const ConvWeights& w, ops::Conv geometry,
         const Var& residual = nullptr);

// GroupNorm, with SiLU behind it where `silu`.
Var group_norm(Context c, const Var& x, const NormWeights& w, int groups, float eps, bool silu);

// qkv [N,P,3,C] -> [N,P,C], one head (ops/group_norm.h).
Var wide_attention(Context c, const Var& qkv);

// [B,T,H,W,2C] -> [B,2T,H,W,C].
Var depth_to_time(Context c, const Var& x);

// [B,C,T,H,W] -> [B,T,H,W,C] and back.
Var channels_last(Context c, const Var& x);
Var channels_first(Context c, const Var& x);

}  // namespace weft::nn
