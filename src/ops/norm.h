// Normalisations: LayerNorm with adaptive modulation (adaLN) and the gated residual that goes with
// it, RMSNorm, GroupNorm, SPADE, batch norm.
#pragma once

#include "ops/dispatch.h"

namespace weft::ops {

// Per-token modulation is kept per frame: `m` f32 [G,K,C] holds G rows of K vectors (shift, scale,
// gate ...) and `rows` i32 [B*T] names the row that each frame uses, so that clean conditioning
// frames (x_mask false) pick the t=0 rows. Token (b,t,s) of x [B,T,S,C] belongs to frame b*T+t.
//
// A model in bf16 may keep its residual stream in f32. "x / y" below are the types of the residual
// stream (x, dx, and dy of the gate) and of the branch (y, dy of the norm, p, dp): f32 / f32, bf16
// / bf16, or f32 / bf16.

// y = LN(x) * (1 + m[row, scale]) + m[row, shift]; LN without affine, eps 1e-6, biased variance
// (docs/models/stdit3.md, Modulation). x, y [frames, S, C], types as above; stats f32 [frames*S, 2]
// = (mean, 1/sigma). Frames whose row is below `first_row` pass unchanged (0: none), and their
// stats are not written.
WEFT_MEMORY_OP(layer_norm_modulate_forward,
               void(const Tensor& x, const Tensor& m, const Tensor& rows, int shift, int scale,
                    int first_row, Tensor& y, Tensor& stats));

// dx (+)= d LN, by `accumulate`; dm[row, shift] += sum g, dm[row, scale] += sum g * LN(x), over the
// frames of each row, in order of frames. x, dy, dx [frames, S, C]; dm f32 [G,K,C]. Frames below
// `first_row` pass dy unchanged.
WEFT_MEMORY_OP(layer_norm_modulate_backward,
               void(const Tensor& x, const Tensor& m, const Tensor& rows, int shift, int scale,
                    int first_row, const Tensor& stats, const Tensor& dy, Tensor& dx,
                    bool accumulate, Tensor& dm));

// The affine LayerNorm: y = LN(x) * w + b, w, b f32 [C]; stats f32 [rows, 2] over the rows of C.
WEFT_MEMORY_OP(layer_norm_affine_forward,
               void(const Tensor& x, const Tensor& w, const Tensor& b, Tensor& y, Tensor& stats));
// dx (+)= by `accumulate`; dw += sum dy * LN(x), db += sum dy, both undefined: not wanted.
WEFT_MEMORY_OP(layer_norm_affine_backward,
               void(const Tensor& x, const Tensor& w, const Tensor& stats, const Tensor& dy,
                    Tensor& dx, bool accumulate, Tensor& dw, Tensor& db));

// y = x + m[row, gate] * keep[b] * p, the gated residual (docs/models/stdit3.md, Block). keep f32
// [B] is drop path's factor (0 or 1/keep probability); an undefined tensor means 1. x, p, y [B*T,
// S, C]; y may be x.
WEFT_MEMORY_OP(gate_residual_forward,
               void(const Tensor& x, const Tensor& p, const Tensor& m, const Tensor& rows, int gate,
                    const Tensor& keep, Tensor& y));

// dp = dy * gate * keep, dm[row, gate] += sum dy * p * keep. The gradient of x is dy itself. dp may
// be p. dbias f32 [C] (+)= column sums of dp, the bias gradient of the layer that made p
// (undefined: not wanted).
WEFT_MEMORY_OP(gate_residual_backward,
               void(const Tensor& dy, const Tensor& p, const Tensor& m, const Tensor& rows,
                    int gate, const Tensor& keep, Tensor& dp, Tensor& dm, Tensor& dbias,
                    bool accumulate));

// m[g] = table + t[g]: table f32 [K,C], t f32 [G,K*C] (or [G,C] broadcast over K, when t has C
// columns).
WEFT_MEMORY_OP(modulation_forward, void(const Tensor& table, const Tensor& t, Tensor& m));
// dtable += sum over g of dm (if defined); dt += dm (summed over K when t has C columns).
WEFT_MEMORY_OP(modulation_backward, void(const Tensor& dm, Tensor& dtable, Tensor& dt));

// What each frame is modulated by: rows 0..B-1 of `times` and `rates` f32 [G] are the samples'
// timestep and fps; with a frame mask u8 [B,T] (G = 2B) rows B..2B-1 are t = 0, for frames with
// mask 0. rows i32 [B*T] names each frame's row, sample_rows i32 [B*T] its sample's. timestep, fps
// f32 [B]; the mask may be undefined (G = B).
WEFT_MEMORY_OP(modulation_rows,
               void(const Tensor& timestep, const Tensor& fps, const Tensor& mask, Tensor& times,
                    Tensor& rates, Tensor& rows, Tensor& sample_rows));

// y = w * x / sqrt(mean(x^2) + eps), over the C channels of each row (docs/models/t5.md, Forward).
// x, y [M,C] f32 or bf16, w f32 [C]; the mean in f32.
WEFT_MEMORY_OP(rms_norm_forward, void(const Tensor& x, const Tensor& w, float eps, Tensor& y));

// The same of queries and keys before they are split into heads, and their rotation by position:
// y = rope(w * x / sqrt(mean(x^2) + eps)), the mean over all C = heads * D channels of a token.
// Channels (2m, 2m+1) of each head turn by pair m of the token's row of `rope` f32 [N, D/2, 2] =
// (cos, sin): (a, b) -> (a cos - b sin, a sin + b cos). rope undefined: no rotation. x, y [..., N,
// C] f32 or bf16 alike, w f32 [C].
WEFT_MEMORY_OP(rms_rope_forward, void(const Tensor& x, const Tensor& w, const Tensor& rope,
                                      int heads, float eps, Tensor& y));
// dx is written and may be dy; dw f32 [C] is added to, undefined: not wanted.
WEFT_MEMORY_OP(rms_rope_backward,
               void(const Tensor& x, const Tensor& w, const Tensor& rope, int heads, float eps,
                    const Tensor& dy, Tensor& dx, Tensor& dw));

// y = act((x - mean) / sqrt(var + eps) * gamma + beta), mean and biased variance over the C/groups
// channels of a group and all P positions of sample n; act is SiLU where `silu`, else nothing
// (docs/models/video_vae.md, Spatial VAE, Temporal VAE, Derivatives). x, y [N, ..., C] f32 or bf16,
// seen as [N,P,C]; gamma, beta f32 [C]; stats f32 [N,groups,2] = (mean, 1/sigma). y may be x.
// Statistics in f32 with sums that do not cancel.
WEFT_MEMORY_OP(group_norm_forward,
               void(const Tensor& x, const Tensor& gamma, const Tensor& beta, int groups, float eps,
                    bool silu, Tensor& y, Tensor& stats));
// dx (+)=, dgamma, dbeta f32 [C] += (both undefined: not wanted). SiLU's argument is made again
// from x. dx may be dy where it does not accumulate.
WEFT_MEMORY_OP(group_norm_backward,
               void(const Tensor& x, const Tensor& gamma, const Tensor& beta, const Tensor& stats,
                    int groups, bool silu, const Tensor& dy, Tensor& dx, bool accumulate,
                    Tensor& dgamma, Tensor& dbeta));

// Groups of one channel, one sample (a BatchNorm in training), differentiated twice. The tangent of
// y along that of x is what group_norm_backward makes of it as `dy`, for that map is its own
// transpose: yt = gamma / sigma (xt - mean(xt) - xhat mean(xhat xt)). Here, given dyt, its gradient
// by x and gamma: dx (+)=, dgamma f32 [C] +=. That by xt is the same map again. x, tangent, dyt, dx
// [1, ..., C] of one type; stats as the forward wrote them. dx is none of the others.
WEFT_MEMORY_OP(batch_norm_tangent_backward,
               void(const Tensor& x, const Tensor& gamma, const Tensor& stats,
                    const Tensor& tangent, const Tensor& dyt, Tensor& dx, bool accumulate,
                    Tensor& dgamma));

// Spatially adaptive normalisation (SPADE, arXiv:1903.07291) over channels-last frames, f32 or
// bf16: an instance norm whose scale and shift are maps. Arithmetic is f32.
//
// A block's sum with a residual of half its size is ops/resize.h's nearest_forward, which adds.

// Positions of a sample are summed in pieces, which are put together in order.
struct InstancePieces {
  std::int64_t length, count;
};
InstancePieces instance_pieces(std::int64_t positions);

// statistics f32 [N,2,C] = (mean, 1 / sqrt(biased variance + 1e-5)) of each channel over all
// positions of a sample of x [N,T,H,W,C]. The sums do not cancel, and their order depends on the
// shape alone. A map seen nearest at twice its size has the statistics of the map.
constexpr float instance_norm_eps = 1e-5f;
WEFT_SCRATCH_OP(instance_statistics, void(const Tensor& x, Tensor& statistics), memory_bound());

// y [N,1,H,W,C] = leaky((x - mean) rstd (1 + gamma) + beta), leaky(v) = v < 0 ? slope v : v (slope
// 1: v). gamma_beta [N,1,H,W,2C] has gamma, then beta. With `upsample` x is [N,1,H/2,W/2,C], read
// nearest at twice its size. y may be x without `upsample`.
WEFT_MEMORY_OP(spade, void(const Tensor& x, const Tensor& statistics, const Tensor& gamma_beta,
                           bool upsample, float slope, Tensor& y));

// Batch norm over activations [..., C], seen as [P,C]: P positions of all samples (docs/models/
// segmentation.md, Batch norm). In parts, so that ranks can add up their sums between them:
//   forward   batch_norm_sums, (the ranks' sums,) batch_norm_statistics, batch_norm_apply
//   backward  batch_norm_backward_sums, (the ranks' sums,) batch_norm_backward
// x, y, dy and their like are f32 or bf16, of one type; what is kept per channel is f32.

enum class Activation { none, relu, relu6 };

// What u = xhat gamma + beta is clamped to; the gradient passes strictly between.
struct ActivationRange {
  float low, high;
};
ActivationRange range_of(Activation act);

// Positions are summed in pieces of `rows`, by shape alone: a piece in f32, as differences from the
// first position where squares would cancel; the pieces in f64, in order.
struct BatchNormPieces {
  std::int64_t rows, count;
};
BatchNormPieces batch_norm_pieces(const Tensor& x);

// sums f64 [2C+1] = sum of x, sum of x^2, P.
WEFT_SCRATCH_OP(batch_norm_sums, void(const Tensor& x, Tensor& sums), memory_bound());

// ordinary: xhat = (x - mean) / sqrt(var + eps), and running = (1 - m) running + m new.
// synchronised: xhat = (x - mean) / sqrt(max(var, eps)); tmp = (1 - m) tmp + new, iter = (1 - m)
// iter + 1, running = tmp / iter.
// The running variance is the unbiased one, of at least two positions.
enum class BatchNormForm { ordinary, synchronised };

// stats f32 [4,C] = mean, 1/sigma, and what the backward takes of the two sums' means: 1/P each, or
// 0 for the second where the variance was clamped (below eps). From `sums` as above, of all ranks.
// Running mean, variance, their tmp [C] and iter [1] are updated where given, tmp and iter only in
// the synchronised form.
WEFT_MEMORY_OP(batch_norm_statistics,
               void(const Tensor& sums, BatchNormForm form, float eps, float momentum,
                    Tensor& stats, Tensor& running_mean, Tensor& running_var, Tensor& tmp_mean,
                    Tensor& tmp_var, Tensor& iter));
// The same from the running statistics: 1 / sqrt(running_var + eps), on which no x has influence:
// rows 2 and 3 are 0.
WEFT_MEMORY_OP(batch_norm_running_statistics,
               void(const Tensor& running_mean, const Tensor& running_var, float eps,
                    Tensor& stats));

// y = act((x - mean) (gamma / sigma) + beta + r): r is `residual`, or nothing where that is
// undefined, or, with residual_stats, residual_gamma and residual_beta given, its batch norm. y may
// be x.
WEFT_MEMORY_OP(batch_norm_apply, void(const Tensor& x, const Tensor& stats, const Tensor& gamma,
                                      const Tensor& beta, const Tensor& residual,
                                      const Tensor& residual_stats, const Tensor& residual_gamma,
                                      const Tensor& residual_beta, Activation act, Tensor& y));

// sums f64 [2C] = sum of g, sum of g xhat, where g is dy if act passes it, else 0; dgamma and dbeta
// f32 [C] += them where given (this rank's share). Without a residual act's argument is made again
// from x; with one, y decides, and dy becomes g, the gradient of the residual. `y` undefined: no
// residual.
WEFT_SCRATCH_OP(batch_norm_backward_sums,
                void(const Tensor& x, const Tensor& stats, const Tensor& gamma, const Tensor& beta,
                     Activation act, const Tensor& y, Tensor& dy, Tensor& sums, Tensor& dgamma,
                     Tensor& dbeta),
                memory_bound());

// dx (+)= gamma / sigma (g - stats[2] sums[0] - xhat stats[3] sums[1]), `sums` of all ranks. `act`
// as above, none where dy is g already. dx may be dy where it does not accumulate.
WEFT_MEMORY_OP(batch_norm_backward, void(const Tensor& x, const Tensor& stats, const Tensor& gamma,
                                         const Tensor& beta, Activation act, const Tensor& dy,
                                         const Tensor& sums, Tensor& dx, bool accumulate));

// Channel norm of Wan's VAE (docs/models/wan_vae.md, Parts): y = act(gamma sqrt(C) x / max(|x|,
// shortest_channels)), |x| the length over the C channels of a position; act is SiLU where `silu`,
// else nothing. x, y [..., C] f32 or bf16, gamma f32 [C]; lengths in f32. y may be x.
constexpr float shortest_channels = 1e-12f;
WEFT_MEMORY_OP(channel_norm_forward,
               void(const Tensor& x, const Tensor& gamma, bool silu, Tensor& y));
// dx (+)=, dgamma f32 [C] += (undefined: not wanted). All but dy is made again from x. dx may be dy
// where it does not accumulate. A position shorter than shortest_channels is a linear map.
WEFT_MEMORY_OP(channel_norm_backward,
               void(const Tensor& x, const Tensor& gamma, bool silu, const Tensor& dy, Tensor& dx,
                    bool accumulate, Tensor& dgamma));

}  // namespace weft::ops
