// Cross attention with short captions, its projections absorbed into the caption's side. With L keys a sample,
//   scores of head h = (x Wq_h^T + bq_h) K_h^T / sqrt(D) = x A_h^T + a0_h,   A_h = K_h Wq_h / sqrt(D)  [L, C]
//   output           = sum over h of P_h (V_h Wo_h^T)   = P B^T,             B_h = Wo_h V_h^T          [C, L]
// so the two products of N tokens with C x C weights become two with C x (H L): fewer operations as long as L < D, with
// the same result up to rounding. Keys of a head are padded to Lp, a multiple of 16; columns are (head, key).
#pragma once

#include "ops/dispatch.h"

namespace weft::ops {

constexpr std::int64_t absorbed_padding = 16;

// One sample: kv [L,2,H,D] f32 or bf16; wq, wo f32 [C,C], bq f32 [C] -> a [H*Lp, C] and b [C, H*Lp] of kv's type, a0 f32
// [H*Lp]; padding is zero. C is a multiple of 16.
WEFT_OP(absorb_forward, void(const Tensor& kv, const Tensor& wq, const Tensor& bq, const Tensor& wo,
                             Tensor& a, Tensor& a0, Tensor& b));
// From da f32 [H*Lp, C], da0 f32 [H*Lp], db f32 [C, H*Lp]: dkv [L,2,H,D] is written; dwq, dbq, dwo are added to, or left alone
// where undefined.
WEFT_OP(absorb_backward,
        void(const Tensor& kv, const Tensor& wq, const Tensor& bq, const Tensor& wo,
             const Tensor& da, const Tensor& da0, const Tensor& db, Tensor& dkv, Tensor& dwq,
             Tensor& dbq, Tensor& dwo));

// s [N, H*Lp], in place: softmax over the first `length` columns of each head's Lp; the padding becomes 0.
WEFT_OP(head_softmax_forward, void(Tensor& s, int heads, int length));
// ds = p (dp - sum of p dp over the head), in place of dp.
WEFT_OP(head_softmax_backward, void(const Tensor& p, Tensor& dp, int heads));

}  // namespace weft::ops
