// Differentiable operations of convolutional models, over channels-last activations [N,T,H,W,C],
// and the parameters of their layers with the start that PyTorch gives them.
#pragma once

#include <string>
#include <vector>

#include "nn/nn.h"
#include "ops/conv.h"
#include "ops/dispatch.h"

namespace weft::nn {

struct ConvWeights {
  Parameter* weight = nullptr;  // [out, in / groups, kt, kh, kw], or without kt
  Parameter* bias = nullptr;    // [out], or none
};
struct NormWeights {
  Parameter *weight = nullptr, *bias = nullptr;  // [C]
};

// conv(x) + bias (+ residual).
Var conv(Context c, const Var& x, const ConvWeights& w, ops::Conv geometry,
         const Var& residual = nullptr);

// GroupNorm, with SiLU behind it where `silu`.
Var group_norm(Context c, const Var& x, const NormWeights& w, int groups, float eps, bool silu);

// Channel norm, gamma of C values, with SiLU behind it where `silu` (ops/norm.h).
Var channel_norm(Context c, const Var& x, Parameter& gamma, bool silu);

// qkv [N,P,3,C] -> [N,P,C], one head (ops/attention.h).
Var wide_attention(Context c, const Var& qkv);

// [B,T,H,W,2C] -> [B,2T,H,W,C].
Var depth_to_time(Context c, const Var& x);

// Blocks of pixels to channels and back (ops/layout.h): a channel of the first's result is the mean
// of the entries that it stands for, and the second gives each entry its channel. `sum`, if given,
// is added and overwritten: nothing else may need its value.
Var space_to_depth(Context c, const Var& x, ops::Blocks blocks, std::int64_t channels,
                   const Var& sum = nullptr);
Var depth_to_space(Context c, const Var& y, ops::Blocks blocks, std::int64_t channels,
                   const Var& sum = nullptr);

// [B,C,T,H,W] -> [B,T,H,W,C] and back.
Var channels_last(Context c, const Var& x);
Var channels_first(Context c, const Var& x);

// x where it is above 0, else slope * x; slope 0 is ReLU. Overwrites x: nothing else may need its
// value.
Var leaky_relu(Context c, const Var& x, float slope);

// Maximum of each 2x2 square: [N,T,H,W,C] -> [N,T,H/2,W/2,C].
Var max_pool(Context c, const Var& x);

// Concatenates frames: pieces [B,t,H,W,C] -> [B,sum t,H,W,C].
Var join_frames(Context c, const std::vector<Var>& pieces);
// Frames [first, first + count) of x [B,T,H,W,C].
Var take_frames(Context c, const Var& x, std::int64_t first, std::int64_t count);

// Frames [first, first + count) of x [1,T,H,W,C]: the same memory.
Tensor frames_of(const Tensor& x, std::int64_t first, std::int64_t count);

// z [...,C] of the moments' type, drawn from moments [...,2C] (ops/random.h); eps f32 [...,C],
// undefined for the mean; affine f32 [2,C] or undefined.
Var posterior_draw(Context c, const Var& moments, const Tensor& eps, const Tensor& affine);

// Moments with the log variance clamped to [-30, 20].
Var clamp_log_variance(Context c, const Var& moments);

// x * a[c] + b[c], affine f32 [2,C] = (a, b).
Var channel_affine(Context c, const Var& x, const Tensor& affine);

// Frames [first, T) of x [B,T,H,W,C].
Var drop_frames(Context c, const Var& x, std::int64_t first);
// `count` frames of zeros and x behind them: [B,count+T,H,W,C].
Var pad_frames(Context c, const Var& x, std::int64_t count);

}  // namespace weft::nn

namespace weft {

// NAME.weight [out, in, kernel...] (in: a group's input channels) and, with `bias`, NAME.bias
// [out], both uniform within 1 / sqrt(fan in). `kernel` is {k, k} or {k, k, k}.
nn::ConvWeights add_conv(ParameterTable& table, const std::string& name, std::int64_t out,
                         std::int64_t in, std::initializer_list<std::int64_t> kernel, bool bias,
                         bool trainable = true);
// NAME.weight [out, in] and NAME.bias [out], likewise.
nn::Linear add_dense(ParameterTable& table, const std::string& name, std::int64_t out,
                     std::int64_t in, bool trainable = true);
// NAME.weight [C] of ones and NAME.bias [C] of zeros.
nn::NormWeights add_norm(ParameterTable& table, const std::string& name, std::int64_t channels,
                         bool trainable = true);

}  // namespace weft

namespace weft::nn {

// The 3x3 convolution that joins a pyramid of pooled grids to the activations that they were pooled
// from (the head of PSPNet and UPerNet), without the joined activations.

// conv 3x3 (padding 1, no bias) of x [N,1,H,W,C] and all levels [N,1,s,s,Ci], each resized to H x W
// (bilinear, align_corners=False), joined over channels in this order; w.weight [out, C + sum Ci,
// 3, 3]. Returns [N,1,H,W,out] of x's type.
//
// Neither the resized levels nor the concatenation exists: a resized grid is a sum over its cells,
// so its convolution is A Z, where Z holds, for each cell and each of the 9 taps, the tap's weights
// times the cell's channels, and A, a function of the sizes alone, what cells weigh in shifted
// pixels (ops/conv.h). With 4 levels of 512 channels and x of 2048, half of the products
// and of the memory. In bf16, A and Z are rounded to it.
Var pyramid_conv(Context c, const Var& x, const std::vector<Var>& levels, const ConvWeights& w);

// Deformable convolution (DCNv2) on the tape.

// x [N,T,H,W,C] and offsets [N,T,h,w,27] of its type (ops/conv.h: 18 offsets, then 9 logits
// of masks), w.weight [out,C,3,3] without bias -> [N,T,h,w,out]. The geometry's kernel is 3x3 with
// one group; it is also that of the convolution that makes the offsets. Gradients go to x, offsets
// and the weight; the same inputs give the same bits.
//
// Columns [pixels, 9 C] are made for a band of pixels at a time and multiplied by the weights:
// beside the result this takes deform_scratch bytes of the arena. The backward takes that once for
// columns or their gradient and once for x's gradient in f32, which is made for as many frames at a
// time as fit in there, but at least one; on a GPU also the lists of ops/conv.h, less than
// half of it.
Var deform_conv(Context c, const Var& x, const Var& offsets, const ConvWeights& w,
                ops::Conv geometry);

// 64 MiB. Tests set less, to have several bands.
extern std::int64_t deform_scratch;

// Values with their tangents (forward-mode differentiation): the derivative of a discriminator's
// layers along a direction at its input. Both are on the tape, so that this derivative can itself
// be differentiated (gradient penalties).

struct Dual {
  Var value, tangent;  // of one shape and type
};

// Without a residual.
Dual conv(Context c, const Dual& x, const ConvWeights& w, ops::Conv geometry);

// A norm for each channel over all positions of one sample, by their own statistics.
Dual batch_norm(Context c, const Dual& x, const NormWeights& w, float eps);

// Overwrites both tensors of x: nothing else may need their values.
Dual leaky_relu(Context c, const Dual& x, float slope);

}  // namespace weft::nn
