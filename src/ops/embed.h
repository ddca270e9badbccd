// Embeddings: positions, timesteps, rotary tables, tokens and packed captions.
#pragma once

#include "ops/dispatch.h"

namespace weft::ops {

// p f32 [H*W, C]: 2-D sine-cosine position embedding, x (width) first (docs/models/stdit3.md,
// Position embedding). scale = sqrt(height*width)/input_sq_size in pixels.
WEFT_OP(position_embedding, void(int H, int W, double scale, Tensor& p));
// x [B,T,S,C] += p [S,C], broadcast over B and T.
WEFT_OP(add_position, void(const Tensor& p, Tensor& x));

// e f32 [N,2*half]: [cos(s f_k) | sin(s f_k)], f_k = exp(-ln(10000) k/half), angles in f32
// (docs/models/stdit3.md, Timestep embedding).
WEFT_OP(timestep_embedding, void(const Tensor& s, Tensor& e));

// rope f32 [positions, D/2, 2] = (cos, sin) of position * freqs[i], freqs f32 [D/2]
// (docs/models/stdit3.md, Self attention).
WEFT_OP(rope_table, void(const Tensor& freqs, Tensor& rope));

// y [M,C] = rows ids[M] i32 of table [V,C], of the table's type. Every id is in [0,V).
WEFT_OP(embedding_forward, void(const Tensor& ids, const Tensor& table, Tensor& y));

// rows [sum L, C] from y f32 [B,Lmax,C]: the rows named by `index` i32 [sum L] (flat b*Lmax + l; a
// negative entry -1-l takes row l of `null` f32 [Lmax,C], the null caption; `padding_row` makes a
// row of zeros).
constexpr std::int32_t padding_row = INT32_MIN;
WEFT_OP(gather_captions,
        void(const Tensor& y, const Tensor& null_caption, const Tensor& index, Tensor& rows));
// dy f32 [B,Lmax,C] += drows at the same places; null and padding rows get none.
WEFT_OP(gather_captions_backward, void(const Tensor& drows, const Tensor& index, Tensor& dy));

}  // namespace weft::ops
