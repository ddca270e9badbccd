// Attention of STDiT3, reading q, k and v where the linear layers wrote them: nothing is ever permuted.
#pragma once

#include "ops/dispatch.h"

namespace weft::ops {

// The axis that self attention runs along: S tokens of one frame, or T frames of one token.
enum class Axis { space, time };

// Self attention with q/k RMSNorm (eps 1e-6) and, where `rope` is defined, rotary embedding of
// q and k in interleaved pairs, scores scaled by 1/sqrt(D), softmax in f32 (specs/stdit3.md 5.7).
//   qkv [B,T,S,3,H,D], wq, wk f32 [D] (undefined: no q/k norm), rope f32 [positions, D/2, 2] = (cos, sin),
//   out [B,T,S,H*D], lse f32 [sequences, H, length] = log-sum-exp of the scores, kept for the backward.
WEFT_OP(self_attention_forward, void(const Tensor& qkv, const Tensor& wq, const Tensor& wk,
                                     const Tensor& rope, Axis axis, Tensor& out, Tensor& lse));

// dqkv is written; dwq, dwk f32 [D] are added to (undefined: not wanted or no norm).
WEFT_OP(self_attention_backward,
        void(const Tensor& qkv, const Tensor& wq, const Tensor& wk, const Tensor& rope, Axis axis,
             const Tensor& out, const Tensor& lse, const Tensor& dout, Tensor& dqkv, Tensor& dwq,
             Tensor& dwk));

// Cross attention over packed captions (specs/stdit3.md 5.8): the N queries of sample b see the keys
// [offsets[b], offsets[b+1]) only. q, out [B,N,H*D], kv [sum L,2,H,D], offsets i32 [B+1], lse f32 [B,H,N].
// A sample without keys gets zeros. Rows of kv from offsets[B] on are padding.
WEFT_OP(cross_attention_forward, void(const Tensor& q, const Tensor& kv, const Tensor& offsets,
                                      int heads, Tensor& out, Tensor& lse));
// dq and dkv are written; padding gets zeros.
WEFT_OP(cross_attention_backward,
        void(const Tensor& q, const Tensor& kv, const Tensor& offsets, int heads, const Tensor& out,
             const Tensor& lse, const Tensor& dout, Tensor& dq, Tensor& dkv));

}  // namespace weft::ops
