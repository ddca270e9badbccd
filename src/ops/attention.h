// Attention: self attention along space or time, cross attention over packed captions, the same
// with absorbed projections, self attention with relative positions, and a single wide head. q, k
// and v are read where the linear layers wrote them: nothing is ever permuted.
#pragma once

#include "ops/dispatch.h"

namespace weft::ops {

// The axis that self attention runs along: S tokens of one frame, or T frames of one token.
enum class Axis { space, time };

// Self attention with q/k RMSNorm (eps 1e-6) and, where `rope` is defined, rotary embedding of
// q and k in interleaved pairs, scores scaled by 1/sqrt(D), softmax in f32 (docs/models/stdit3.md,
// Self attention).
//   qkv [B,T,S,3,H,D], wq, wk f32 [D] (undefined: no q/k norm), rope f32 [positions, D/2, 2] =
//     (cos, sin),
//   out [B,T,S,H*D], lse f32 [sequences, H, length] = log-sum-exp of the scores, kept for the
//     backward,
//   qk [B,T,S,2,H,D] of qkv's type, or undefined: room for q and k after norm and rotation
//     (keeps_qk).
WEFT_CUDA_SCRATCH_OP(self_attention_forward,
                     void(const Tensor& qkv, const Tensor& wq, const Tensor& wk, const Tensor& rope,
                          Axis axis, Tensor& out, Tensor& lse, Tensor& qk),
                     of_attention(4 * count(out) * lse.dim(2)));

// dqkv is written; dwq, dwk f32 [D] are added to (undefined: not wanted or no norm). qk: as the
// forward left it, or undefined; the results are the same.
WEFT_CUDA_SCRATCH_OP(self_attention_backward,
                     void(const Tensor& qkv, const Tensor& wq, const Tensor& wk, const Tensor& rope,
                          Axis axis, const Tensor& out, const Tensor& lse, const Tensor& dout,
                          Tensor& dqkv, Tensor& dwq, Tensor& dwk, const Tensor& qk),
                     of_attention_backward(10 * count(out) * lse.dim(2)));

// Whether a GPU's backward is cheaper with the forward's `qk`, where one pass over q and k makes
// it. Along time most kernels normalise and rotate what they have just read, and a CPU's always do:
// they leave `qk` alone.
inline bool keeps_qk(const Tensor& wq, const Tensor& rope, Axis axis) {
  return axis == Axis::space && (wq.defined() || rope.defined());
}
inline Shape qk_shape(const Shape& qkv) { return {qkv[0], qkv[1], qkv[2], 2, qkv[4], qkv[5]}; }

// Cross attention over packed captions (docs/models/stdit3.md, Cross attention): the N queries of
// sample b see the keys [offsets[b], offsets[b+1]) only. q, out [B,N,H*D], kv [sum L,2,H,D],
// offsets i32 [B+1], lse f32 [B,H,N]. A sample without keys gets zeros. Rows of kv from offsets[B]
// on are padding.
WEFT_OP(cross_attention_forward,
        void(const Tensor& q, const Tensor& kv, const Tensor& offsets, int heads, Tensor& out,
             Tensor& lse),
        of_attention(4 * count(q) * kv.dim(0) / (offsets.numel() - 1)));
// dq and dkv are written; padding gets zeros.
WEFT_CUDA_SCRATCH_OP(cross_attention_backward,
                     void(const Tensor& q, const Tensor& kv, const Tensor& offsets, int heads,
                          const Tensor& out, const Tensor& lse, const Tensor& dout, Tensor& dq,
                          Tensor& dkv),
                     of_attention_backward(10 * count(q) * kv.dim(0) / (offsets.numel() - 1)));

// Attention of samples whose q, k and v are tensors of their own (docs/models/wan.md): out =
// softmax(q k^T / sqrt(D)) v. The N queries of sample b see the keys [offsets[b], offsets[b+1])
// only.
//   q, out [B,N,H*D], k, v [keys, H*D] (or [B,N,H*D]), f32 or bf16; D at most 128, of f32 a
//     multiple of 4, of bf16 of 8,
//   offsets i32 [B+1], undefined: the rows of k and v are B equal parts; rows from offsets[B] on
//     are padding,
//   last_bias f32 [B] or undefined: added to the scaled score of each sample's last key (ln n makes
//     it count as n equal keys),
//   lse f32 [B,H,N] = log-sum-exp of the scores, kept for the backward.
// A sample without keys gets zeros.
WEFT_OP(attention_forward,
        void(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& offsets,
             const Tensor& last_bias, int heads, Tensor& out, Tensor& lse),
        of_unpacked_attention(4 * count(q) * count(k) / (q.dim(0) * q.dim(2))));
// dq, dk and dv are written; padding gets zeros.
WEFT_CUDA_SCRATCH_OP(attention_backward,
                     void(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& offsets,
                          const Tensor& last_bias, int heads, const Tensor& out, const Tensor& lse,
                          const Tensor& dout, Tensor& dq, Tensor& dk, Tensor& dv),
                     of_unpacked_attention_backward(10 * count(q) * count(k) /
                                                    (q.dim(0) * q.dim(2))));

// Cross attention with short captions, its projections absorbed into the caption's side. With L
// keys a sample,
//   scores of head h = (x Wq_h^T + bq_h) K_h^T / sqrt(D) = x A_h^T + a0_h,   A_h = K_h Wq_h /
//     sqrt(D) [L, C]
//   output           = sum over h of P_h (V_h Wo_h^T) = P B^T, B_h = Wo_h V_h^T [C, L]
// so the two products of N tokens with C x C weights become two with C x (H L): fewer operations as
// long as L < D, with the same result up to rounding. Keys of a head are padded to Lp, a multiple
// of 16; columns are (head, key).
constexpr std::int64_t absorbed_padding = 16;

// One sample: kv [L,2,H,D] f32 or bf16; wq, wo f32 [C,C], bq f32 [C] -> a [H*Lp, C] and b [C, H*Lp]
// of kv's type, a0 f32 [H*Lp]; padding is zero. C is a multiple of 16.
WEFT_OP(absorb_forward,
        void(const Tensor& kv, const Tensor& wq, const Tensor& bq, const Tensor& wo, Tensor& a,
             Tensor& a0, Tensor& b),
        of_product(2 * count(kv) * wq.dim(0)));
// From da f32 [H*Lp, C], da0 f32 [H*Lp], db f32 [C, H*Lp]: dkv [L,2,H,D] is written; dwq, dbq, dwo
// are added to, or left alone where undefined.
WEFT_OP(absorb_backward,
        void(const Tensor& kv, const Tensor& wq, const Tensor& bq, const Tensor& wo,
             const Tensor& da, const Tensor& da0, const Tensor& db, Tensor& dkv, Tensor& dwq,
             Tensor& dbq, Tensor& dwo),
        of_product(4 * count(kv) * wq.dim(0)));

// s [N, H*Lp], in place: softmax over the first `length` columns of each head's Lp; the padding
// becomes 0.
WEFT_OP(head_softmax_forward, void(Tensor& s, int heads, int length), moves(2 * bytes(s)));
// ds = p (dp - sum of p dp over the head), in place of dp.
WEFT_OP(head_softmax_backward, void(const Tensor& p, Tensor& dp, int heads),
        moves(bytes(p) + 2 * bytes(dp)));

// Self attention of packed captions with T5's relative position bias, not scaled
// (docs/models/t5.md, Position bias): caption b has the rows [offsets[b], offsets[b+1]) of each of
// q, k, v, qkv [3,M,H,D]: one behind the other, so that each is the plain product of one weight.
// out [M,H*D]; bias f32 [32,H]; offsets i32 [B+1]; softmax in f32. longest: of the captions, in
// rows.
WEFT_OP(relative_attention_forward,
        void(const Tensor& qkv, const Tensor& bias, const Tensor& offsets, std::int64_t longest,
             Tensor& out),
        of_attention(4 * count(qkv) / 3 * qkv.dim(1) / (offsets.numel() - 1)));

// The bucket of distance = key_pos - query_pos: 32 buckets, distances to 128, both directions
// (docs/models/t5.md, Position bias).
constexpr int relative_bucket(int distance) {
  constexpr int buckets = 16;  // of each direction
  // First distances of buckets 8 to 15: 8 + trunc(8 ln(n/8) / ln(16)) as the original computes it
  // in f32.
  constexpr int first[] = {8, 12, 16, 23, 32, 46, 64, 91};
  const int n = distance < 0 ? -distance : distance;
  int bucket = n < 8 ? n : 7;
  for (const int f : first)
    if (n >= f) ++bucket;
  return bucket + (distance > 0 ? buckets : 0);
}

// Attention of all P positions of a frame to each other with a single wide head
// (docs/models/video_vae.md, Spatial VAE, mid block): out = softmax(q k^T / sqrt(C)) v, qkv
// [N,P,3,C], out [N,P,C], lse f32 [N,P]. Memory beyond that: a tile of scores.
WEFT_OP(wide_attention_forward, void(const Tensor& qkv, Tensor& out, Tensor& lse),
        of_attention(4 * count(out) * out.dim(1)));
// dqkv is written.
WEFT_OP(wide_attention_backward,
        void(const Tensor& qkv, const Tensor& out, const Tensor& lse, const Tensor& dout,
             Tensor& dqkv),
        of_attention_backward(10 * count(out) * out.dim(1)));

}  // namespace weft::ops
