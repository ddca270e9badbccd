// Normalisations: LayerNorm with adaptive modulation (adaLN) and the gated residual that goes with
// it, RMSNorm, GroupNorm.
#pragma once

#include "ops/dispatch.h"

namespace weft::ops {

// Per-token modulation is kept per frame: `m` f32 [G,K,C] holds G rows of K vectors (shift, scale,
// gate ...) and `rows` i32 [B*T] names the row that each frame uses, so that clean conditioning
// frames (x_mask false) pick the t=0 rows. Token (b,t,s) of x [B,T,S,C] belongs to frame b*T+t.

// y = LN(x) * (1 + m[row, scale]) + m[row, shift]; LN without affine, eps 1e-6, biased variance
// (docs/models/stdit3.md, Modulation). x, y [frames, S, C] f32 or bf16; stats f32 [frames*S, 2] =
// (mean, 1/sigma). Frames whose row is below `first_row` pass unchanged (0: none), and their stats
// are not written.
WEFT_OP(layer_norm_modulate_forward,
        void(const Tensor& x, const Tensor& m, const Tensor& rows, int shift, int scale,
             int first_row, Tensor& y, Tensor& stats));

// dx (+)= d LN, by `accumulate`; dm[row, shift] += sum g, dm[row, scale] += sum g * LN(x), over the
// frames of each row, in order of frames. x, dy, dx [frames, S, C]; dm f32 [G,K,C]. Frames below
// `first_row` pass dy unchanged.
WEFT_OP(layer_norm_modulate_backward,
        void(const Tensor& x, const Tensor& m, const Tensor& rows, int shift, int scale,
             int first_row, const Tensor& stats, const Tensor& dy, Tensor& dx, bool accumulate,
             Tensor& dm));

// y = x + m[row, gate] * keep[b] * p, the gated residual (docs/models/stdit3.md, Block). keep f32
// [B] is drop path's factor (0 or 1/keep probability); an undefined tensor means 1. x, p, y [B*T,
// S, C]; y may be x.
WEFT_OP(gate_residual_forward, void(const Tensor& x, const Tensor& p, const Tensor& m,
                                    const Tensor& rows, int gate, const Tensor& keep, Tensor& y));

// dp = dy * gate * keep, dm[row, gate] += sum dy * p * keep. The gradient of x is dy itself. dp may
// be p.
WEFT_OP(gate_residual_backward,
        void(const Tensor& dy, const Tensor& p, const Tensor& m, const Tensor& rows, int gate,
             const Tensor& keep, Tensor& dp, Tensor& dm));

// m[g] = table + t[g]: table f32 [K,C], t f32 [G,K*C] (or [G,C] broadcast over K, when t has C
// columns).
WEFT_OP(modulation_forward, void(const Tensor& table, const Tensor& t, Tensor& m));
// dtable += sum over g of dm (if defined); dt += dm (summed over K when t has C columns).
WEFT_OP(modulation_backward, void(const Tensor& dm, Tensor& dtable, Tensor& dt));

// What each frame is modulated by: rows 0..B-1 of `times` and `rates` f32 [G] are the samples'
// timestep and fps; with a frame mask u8 [B,T] (G = 2B) rows B..2B-1 are t = 0, for frames with
// mask 0. rows i32 [B*T] names each frame's row, sample_rows i32 [B*T] its sample's. timestep, fps
// f32 [B]; the mask may be undefined (G = B).
WEFT_OP(modulation_rows, void(const Tensor& timestep, const Tensor& fps, const Tensor& mask,
                              Tensor& times, Tensor& rates, Tensor& rows, Tensor& sample_rows));

// y = w * x / sqrt(mean(x^2) + eps), over the C channels of each row (docs/models/t5.md, Forward).
// x, y [M,C] f32 or bf16, w f32 [C]; the mean in f32.
WEFT_OP(rms_norm_forward, void(const Tensor& x, const Tensor& w, float eps, Tensor& y));

// y = act((x - mean) / sqrt(var + eps) * gamma + beta), mean and biased variance over the C/groups
// channels of a group and all P positions of sample n; act is SiLU where `silu`, else nothing
// (docs/models/video_vae.md, Spatial VAE, Temporal VAE, Derivatives). x, y [N, ..., C] f32 or bf16,
// seen as [N,P,C]; gamma, beta f32 [C]; stats f32 [N,groups,2] = (mean, 1/sigma). y may be x.
// Statistics in f32 with sums that do not cancel.
WEFT_OP(group_norm_forward, void(const Tensor& x, const Tensor& gamma, const Tensor& beta,
                                 int groups, float eps, bool silu, Tensor& y, Tensor& stats));
// dx (+)=, dgamma, dbeta f32 [C] += (both undefined: not wanted). SiLU's argument is made again
// from x. dx may be dy where it does not accumulate.
WEFT_OP(group_norm_backward, void(const Tensor& x, const Tensor& gamma, const Tensor& beta,
                                  const Tensor& stats, int groups, bool silu, const Tensor& dy,
                                  Tensor& dx, bool accumulate, Tensor& dgamma, Tensor& dbeta));

// Groups of one channel, one sample (a BatchNorm in training), differentiated twice. The tangent of
// y along that of x is what group_norm_backward makes of it as `dy`, for that map is its own
// transpose: yt = gamma / sigma (xt - mean(xt) - xhat mean(xhat xt)). Here, given dyt, its gradient
// by x and gamma: dx (+)=, dgamma f32 [C] +=. That by xt is the same map again. x, tangent, dyt, dx
// [1, ..., C] of one type; stats as the forward wrote them. dx is none of the others.
WEFT_OP(batch_norm_tangent_backward,
        void(const Tensor& x, const Tensor& gamma, const Tensor& stats, const Tensor& tangent,
             const Tensor& dyt, Tensor& dx, bool accumulate, Tensor& dgamma));

}  // namespace weft::ops
