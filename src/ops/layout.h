// Rearrangements: channels first and last, patches, token blocks, channels joined, depth to time,
// channels to pixels, and pixels of 8 bits; then embeddings. Each rearrangement moves every element
// once; none of them computes anything but the conversion of the type, or adds more than a bias.
#pragma once

#include "ops/dispatch.h"

namespace weft::ops {

// y [B,T,H,W,C] = x [B,C,T,H,W] and back, of one type.
WEFT_MEMORY_OP(to_channels_last, void(const Tensor& x, Tensor& y));
WEFT_MEMORY_OP(to_channels_first, void(const Tensor& x, Tensor& y));

// Depth to time (docs/models/video_vae.md, Temporal VAE): x [B,T,H,W,2C], y [B,2T,H,W,C]: channel
// 2c + s of frame t is channel c of frame 2t + s.
WEFT_MEMORY_OP(depth_to_time_forward, void(const Tensor& x, Tensor& y));
// dx is written.
WEFT_MEMORY_OP(depth_to_time_backward, void(const Tensor& dy, Tensor& dx));

// Space to depth, time included (docs/models/wan_vae.md, VAE 2.2): blocks of `frames` x side x side
// pixels of x [B,T,H,W,C], `front` frames of zeros before it, beside y [B,T',H/side,W/side,G],
// T' = (T + front) / frames. Entry e of a block is pixel (dt,dy,dx) of channel c, e = ((c frames +
// dt) side + dy) side + dx, with dx before dy where `columns_first`; channel e / n of y stands for
// n = C frames side^2 / G of them. frames side^2 is at most 8.
struct Blocks {
  int frames = 1, side = 1, front = 0;
  bool columns_first = false;

  int entries() const { return frames * side * side; }
};
// y (+)= scale times the sum of the entries that each of its channels stands for.
WEFT_MEMORY_OP(space_to_depth,
               void(const Tensor& x, Blocks blocks, float scale, bool accumulate, Tensor& y));
// x (+)= scale y, each entry from its channel: the transpose.
WEFT_MEMORY_OP(depth_to_space,
               void(const Tensor& y, Blocks blocks, float scale, bool accumulate, Tensor& x));

struct PatchGeometry {
  int pt, ph, pw;  // patch size
};

// Gathers patches of x f32 [B,Cin,T',H',W'] into rows f32 or bf16 [B,T,S, Cin*pt*ph*pw], element
// order (c,pt,ph,pw), zero beyond the edge; T, H, W = ceil(size / patch), S = H*W
// (docs/models/stdit3.md, Patches).
WEFT_MEMORY_OP(patchify_forward, void(const Tensor& x, PatchGeometry patch, Tensor& rows));
// dx f32 is written: the transpose of the gather.
WEFT_MEMORY_OP(patchify_backward, void(const Tensor& drows, PatchGeometry patch, Tensor& dx));

// out f32 [B,Cout,T',H',W'] from rows [B,T,S, pt*ph*pw*Cout] with element order (pt,ph,pw,c),
// cropped.
WEFT_MEMORY_OP(unpatchify_forward, void(const Tensor& rows, PatchGeometry patch, Tensor& out));
// drows is written; positions beyond the crop get zero.
WEFT_MEMORY_OP(unpatchify_backward, void(const Tensor& dout, PatchGeometry patch, Tensor& drows));

// A rectangle of a token grid: `frames` frames of `tokens` tokens of every sample.
struct TokenBlock {
  std::int64_t frames = 0, tokens = 0;
  std::int64_t from_frame = 0, from_token = 0;  // its place in what is read
  std::int64_t to_frame = 0, to_token = 0;      // and in what is written
};
// Copies the block from x [B,T,S,C] to y [B,T',S',C], of one type, which may be any; the rest of y
// stays.
WEFT_MEMORY_OP(copy_tokens, void(const Tensor& x, TokenBlock block, Tensor& y));

// y [...,C] takes x [...,c] at channel `first`; its other channels stay. Both are of one type, f32
// or bf16.
WEFT_OP(put_channels, void(const Tensor& x, std::int64_t first, Tensor& y), moves(2 * bytes(x)));
// And back: x (+)= the channels [first, first + c) of y.
WEFT_OP(take_channels, void(const Tensor& y, std::int64_t first, Tensor& x, bool accumulate),
        moves(2 * bytes(x)));

// y [N,T,2H,2W,C] from rows [N,T,H,W,4C], of one type: y[2h+i,2w+j,c] = rows[h,w,(c*2+i)*2+j] +
// bias[c], bias f32 [C] or undefined. A transposed 2x2 convolution of stride 2 with PyTorch's
// weights [in,C,2,2] is their product with x [N,T,H,W,in], as a matrix [in,4C], and this.
WEFT_MEMORY_OP(spread_2x2_forward, void(const Tensor& rows, const Tensor& bias, Tensor& y));
// drows is written: the way back. (The gradient of the bias is ops/matmul.h's bias_gradient of dy.)
WEFT_MEMORY_OP(spread_2x2_backward, void(const Tensor& dy, Tensor& drows));

// y [N,T,4H,4W,C] from rows [N,T,H,W,9C], of one type: y[4h+i,4w+j,c] = rows[h,w,(3k(i)+k(j))C+c],
// k = 0, 1, 1, 2. A 3x3 convolution of a map that is seen nearest at four times its size has only
// these nine values in each square of 4x4: its kernel falls on the pixel before, on none other, or
// on the pixel behind, in each direction.
WEFT_MEMORY_OP(spread_4x4, void(const Tensor& rows, Tensor& y));

// x0 f32 [3,T,H,W] = frames u8 [T,H,W,3] / 127.5 - 1.
WEFT_MEMORY_OP(frames_to_latent, void(const Tensor& frames, Tensor& x0));
// And back for people to look at: pixels u8 [T,H,W,3] = (frames f32 in [-1,1], clamped) to 256
// levels, halves up (docs/generate.md, Sizes); 0 where a value is not finite, and bad i32
// [T] += how many of the frame's are not.
WEFT_MEMORY_OP(frames_to_pixels, void(const Tensor& frames, Tensor& pixels, Tensor& bad));

// How a network wants its pixels: channel c is (byte / divisor - mean[c]) / deviation[c], f32 at
// every step. `reversed`: channel c comes from byte 2 - c (BGR), else from byte c.
struct PixelScale {
  float divisor, mean[3], deviation[3];
  bool reversed = false;
};
// y [N,1,H,W,3] f32 or bf16 from images u8 [N,H,W,3], whose first sizes[n] = (rows, columns), sizes
// i32 [N,2], are pixels; 0 beyond them.
WEFT_MEMORY_OP(normalise_images,
               void(const Tensor& images, const Tensor& sizes, PixelScale scale, Tensor& y));

// Embeddings: positions, timesteps, rotary tables, tokens and packed captions.

// p f32 [H*W, C]: 2-D sine-cosine position embedding, x (width) first (docs/models/stdit3.md,
// Position embedding). scale = sqrt(height*width)/input_sq_size in pixels.
WEFT_MEMORY_OP(position_embedding, void(int H, int W, double scale, Tensor& p));
// x [B,T,S,C] += p [S,C], broadcast over B and T.
WEFT_MEMORY_OP(add_position, void(const Tensor& p, Tensor& x));

// e f32 [N,2*half]: [cos(s f_k) | sin(s f_k)], f_k = exp(-ln(10000) k/half), angles in f32
// (docs/models/stdit3.md, Timestep embedding).
WEFT_MEMORY_OP(timestep_embedding, void(const Tensor& s, Tensor& e));

// rope f32 [positions, D/2, 2] = (cos, sin) of position * freqs[i], freqs f32 [D/2]
// (docs/models/stdit3.md, Self attention).
WEFT_MEMORY_OP(rope_table, void(const Tensor& freqs, Tensor& rope));
// The same for positions in three dimensions: rope f32 [N, D/2, 2] for N tokens from `first` on of
// a grid of `rows` x `columns` tokens a frame, in order of frames, rows, columns. D/6 (rounded
// down) of the D/2 pairs turn by the row, as many by the column, and those before them by the
// frame; pair i of an axis with n of them by position * 10000^(-i/n), angles in f64
// (docs/models/wan.md, Positions).
WEFT_MEMORY_OP(rope_table_3d, void(int rows, int columns, std::int64_t first, Tensor& rope));

// y [M,C] = rows ids[M] i32 of table [V,C], of the table's type. Every id is in [0,V).
WEFT_OP(embedding_forward, void(const Tensor& ids, const Tensor& table, Tensor& y),
        moves(bytes(ids) + 2 * bytes(y)));

// rows [sum L, C] from y f32 [B,Lmax,C]: the rows named by `index` i32 [sum L] (flat b*Lmax + l; a
// negative entry -1-l takes row l of `null` f32 [Lmax,C], the null caption; `padding_row` makes a
// row of zeros).
constexpr std::int32_t padding_row = INT32_MIN;
WEFT_MEMORY_OP(gather_captions, void(const Tensor& y, const Tensor& null_caption,
                                     const Tensor& index, Tensor& rows));
// dy f32 [B,Lmax,C] += drows at the same places; null and padding rows get none.
WEFT_MEMORY_OP(gather_captions_backward,
               void(const Tensor& drows, const Tensor& index, Tensor& dy));

}  // namespace weft::ops
