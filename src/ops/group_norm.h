// GroupNorm, alone or with SiLU behind it, over channels-last frames: one pass for the statistics, one for the result.
#pragma once

#include "ops/dispatch.h"

namespace weft::ops {

// y = act((x - mean) / sqrt(var + eps) * gamma + beta), mean and biased variance over the C/groups channels of a group and
// all P positions of sample n; act is SiLU where `silu`, else nothing (specs/vae.md 0.3, 0.4, 6). x, y [N, ..., C] f32 or
// bf16, seen as [N,P,C]; gamma, beta f32 [C]; stats f32 [N,groups,2] = (mean, 1/sigma). y may be x. Statistics in f32 with
// sums that do not cancel.
WEFT_OP(group_norm_forward, void(const Tensor& x, const Tensor& gamma, const Tensor& beta,
                                 int groups, float eps, bool silu, Tensor& y, Tensor& stats));
// dx (+)=, dgamma, dbeta f32 [C] += (both undefined: not wanted). SiLU's argument is made again from x. dx may be dy where it does not accumulate.
WEFT_OP(group_norm_backward, void(const Tensor& x, const Tensor& gamma, const Tensor& beta,
                                  const Tensor& stats, int groups, bool silu, const Tensor& dy,
                                  Tensor& dx, bool accumulate, Tensor& dgamma, Tensor& dbeta));

// Groups of one channel, one sample (a BatchNorm in training), differentiated twice. The tangent of y along that of x is what
// group_norm_backward makes of it as `dy`, for that map is its own transpose: yt = gamma / sigma (xt - mean(xt) - xhat mean(xhat xt)).
// Here, given dyt, its gradient by x and gamma: dx (+)=, dgamma f32 [C] +=. That by xt is the same map again.
// x, tangent, dyt, dx [1, ..., C] of one type; stats as the forward wrote them. dx is none of the others.
WEFT_OP(batch_norm_tangent_backward,
        void(const Tensor& x, const Tensor& gamma, const Tensor& stats, const Tensor& tangent,
             const Tensor& dyt, Tensor& dx, bool accumulate, Tensor& dgamma));

// Attention of all P positions of a frame to each other with a single wide head (specs/vae.md 1, mid block):
// out = softmax(q k^T / sqrt(C)) v, qkv [N,P,3,C], out [N,P,C], lse f32 [N,P]. Memory beyond that: a tile of scores.
WEFT_OP(wide_attention_forward, void(const Tensor& qkv, Tensor& out, Tensor& lse));
// dqkv is written.
WEFT_OP(wide_attention_backward, void(const Tensor& qkv, const Tensor& out, const Tensor& lse,
                                      const Tensor& dout, Tensor& dqkv));

}  // namespace weft::ops
