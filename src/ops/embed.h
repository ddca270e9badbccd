// What surrounds the blocks of STDiT3: patches, position, timestep and caption embedding.
#pragma once

#include "ops/dispatch.h"

namespace weft::ops {

struct PatchGeometry {
  int pt, ph, pw;  // patch size
};

// Gathers patches of x f32 [B,Cin,T',H',W'] into rows f32 or bf16 [B,T,S, Cin*pt*ph*pw], element order
// (c,pt,ph,pw), zero beyond the edge; T, H, W = ceil(size / patch), S = H*W (specs/stdit3.md 3.5).
WEFT_OP(patchify_forward, void(const Tensor& x, PatchGeometry patch, Tensor& rows));
// dx f32 is written: the transpose of the gather.
WEFT_OP(patchify_backward, void(const Tensor& drows, PatchGeometry patch, Tensor& dx));

// out f32 [B,Cout,T',H',W'] from rows [B,T,S, pt*ph*pw*Cout] with element order (pt,ph,pw,c), cropped (5.10).
WEFT_OP(unpatchify_forward, void(const Tensor& rows, PatchGeometry patch, Tensor& out));
// drows is written; positions beyond the crop get zero.
WEFT_OP(unpatchify_backward, void(const Tensor& dout, PatchGeometry patch, Tensor& drows));

// p f32 [H*W, C]: 2-D sine-cosine position embedding, x (width) first (specs/stdit3.md 4).
// scale = sqrt(height*width)/input_sq_size in pixels.
WEFT_OP(position_embedding, void(int H, int W, double scale, Tensor& p));
// x [B,T,S,C] += p [S,C], broadcast over B and T.
WEFT_OP(add_position, void(const Tensor& p, Tensor& x));

// e f32 [N,2*half]: [cos(s f_k) | sin(s f_k)], f_k = exp(-ln(10000) k/half), angles in f32 (5.2).
WEFT_OP(timestep_embedding, void(const Tensor& s, Tensor& e));

// rope f32 [positions, D/2, 2] = (cos, sin) of position * freqs[i], freqs f32 [D/2] (5.7).
WEFT_OP(rope_table, void(const Tensor& freqs, Tensor& rope));

// rows [sum L, C] from y f32 [B,Lmax,C]: the rows named by `index` i32 [sum L] (flat b*Lmax + l; a negative
// entry -1-l takes row l of `null` f32 [Lmax,C], the null caption; `padding_row` makes a row of zeros).
constexpr std::int32_t padding_row = INT32_MIN;
WEFT_OP(gather_captions,
        void(const Tensor& y, const Tensor& null_caption, const Tensor& index, Tensor& rows));
// dy f32 [B,Lmax,C] += drows at the same places; null and padding rows get none.
WEFT_OP(gather_captions_backward, void(const Tensor& drows, const Tensor& index, Tensor& dy));

// What each frame is modulated by: rows 0..B-1 of `times` and `rates` f32 [G] are the samples' timestep and fps; with a
// frame mask u8 [B,T] (G = 2B) rows B..2B-1 are t = 0, for frames with mask 0. rows i32 [B*T] names each frame's row,
// sample_rows i32 [B*T] its sample's. timestep, fps f32 [B]; the mask may be undefined (G = B).
WEFT_OP(modulation_rows, void(const Tensor& timestep, const Tensor& fps, const Tensor& mask,
                              Tensor& times, Tensor& rates, Tensor& rows, Tensor& sample_rows));

// y f32 [G,C] = a[i] + b[i]: the time and fps embeddings of each modulation row.
WEFT_OP(add_rows, void(const Tensor& a, const Tensor& b, Tensor& y));

}  // namespace weft::ops
