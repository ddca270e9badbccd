// Operations of the T5 encoder, forward alone: it is never trained here. Tokens are packed: only those that count are there.
#pragma once

#include "ops/dispatch.h"

namespace weft::ops {

// y = w * x / sqrt(mean(x^2) + eps), over the C channels of each row (specs/t5.md 4). x, y [M,C] f32 or bf16, w f32 [C];
// the mean in f32.
WEFT_OP(rms_norm_forward, void(const Tensor& x, const Tensor& w, float eps, Tensor& y));

// y = gelu_tanh(gu[0]) * gu[1] over gu [2,M,F], the gates before the values: y [M,F], which may be gu[0].
WEFT_OP(gated_gelu_forward, void(const Tensor& gu, Tensor& y));

// Self attention of packed captions with T5's relative position bias, not scaled (specs/t5.md 4): caption b has the rows
// [offsets[b], offsets[b+1]) of each of q, k, v, qkv [3,M,H,D]: one behind the other, so that each is the plain product of
// one weight. out [M,H*D]; bias f32 [32,H]; offsets i32 [B+1]; softmax in f32. longest: of the captions, in rows.
WEFT_OP(relative_attention_forward, void(const Tensor& qkv, const Tensor& bias,
                                         const Tensor& offsets, std::int64_t longest, Tensor& out));
// The bucket of distance = key_pos - query_pos: 32 buckets, distances to 128, both directions (specs/t5.md 4).
int relative_bucket(int distance);

// y [M,C] = rows ids[M] i32 of table [V,C], of the table's type. Every id is in [0,V).
WEFT_OP(embedding_forward, void(const Tensor& ids, const Tensor& table, Tensor& y));

}  // namespace weft::ops
