// LayerNorm with adaptive modulation (adaLN), the normalisation of every STDiT3 block.
#pragma once

#include "ops/dispatch.h"

namespace weft::ops {

// Per-token modulation is kept per frame: `m` f32 [G,K,C] holds G rows of K vectors (shift, scale, gate ...)
// and `rows` i32 [B*T] names the row that each frame uses, so that clean conditioning frames (x_mask false)
// pick the t=0 rows. Token (b,t,s) of x [B,T,S,C] belongs to frame b*T+t.

// y = LN(x) * (1 + m[row, scale]) + m[row, shift]; LN without affine, eps 1e-6, biased variance
// (specs/stdit3.md 5.4, 5.5). x, y [frames, S, C] f32 or bf16; stats f32 [frames*S, 2] = (mean, 1/sigma). Frames whose
// row is below `first_row` pass unchanged (0: none), and their stats are not written.
WEFT_OP(layer_norm_modulate_forward,
        void(const Tensor& x, const Tensor& m, const Tensor& rows, int shift, int scale,
             int first_row, Tensor& y, Tensor& stats));

// dx (+)= d LN, by `accumulate`; dm[row, shift] += sum g, dm[row, scale] += sum g * LN(x), over the frames of
// each row, in order of frames. x, dy, dx [frames, S, C]; dm f32 [G,K,C]. Frames below `first_row` pass dy unchanged.
WEFT_OP(layer_norm_modulate_backward,
        void(const Tensor& x, const Tensor& m, const Tensor& rows, int shift, int scale,
             int first_row, const Tensor& stats, const Tensor& dy, Tensor& dx, bool accumulate,
             Tensor& dm));

// y = x + m[row, gate] * keep[b] * p, the gated residual (specs/stdit3.md 5.6). keep f32 [B] is drop path's
// factor (0 or 1/keep probability); an undefined tensor means 1. x, p, y [B*T, S, C]; y may be x.
WEFT_OP(gate_residual_forward, void(const Tensor& x, const Tensor& p, const Tensor& m,
                                    const Tensor& rows, int gate, const Tensor& keep, Tensor& y));

// dp = dy * gate * keep, dm[row, gate] += sum dy * p * keep. The gradient of x is dy itself. dp may be p.
WEFT_OP(gate_residual_backward,
        void(const Tensor& dy, const Tensor& p, const Tensor& m, const Tensor& rows, int gate,
             const Tensor& keep, Tensor& dp, Tensor& dm));

// m[g] = table + t[g]: table f32 [K,C], t f32 [G,K*C] (or [G,C] broadcast over K, when t has C columns).
WEFT_OP(modulation_forward, void(const Tensor& table, const Tensor& t, Tensor& m));
// dtable += sum over g of dm (if defined); dt += dm (summed over K when t has C columns).
WEFT_OP(modulation_backward, void(const Tensor& dm, Tensor& dtable, Tensor& dt));

}  // namespace weft::ops
