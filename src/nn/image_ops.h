// Differentiable operations of networks that classify or score the pixels of images, over
// channels-last activations [N,T,H,W,C].
#pragma once

#include <vector>

#include "nn/conv.h"
#include "nn/nn.h"
#include "ops/loss.h"

namespace weft::nn {

// Greatest of each 3x3 square, 2 pixels apart, over x padded by one pixel: [N,T,H,W,C] ->
// [N,T,ceil(H/2),ceil(W/2),C].
Var max_pool_3x3(Context c, const Var& x);

// Means over size x size rectangles (ops/resize.h): [N,T,size,size,C].
Var adaptive_average_pool(Context c, const Var& x, int size);

// Means of 2x2 squares, H and W even: [N,T,H/2,W/2,C].
Var average_pool_2x2(Context c, const Var& x);

// Bilinear (ops/resize.h): [N,T,height,width,C]; x itself where that is its size.
Var resize_bilinear(Context c, const Var& x, std::int64_t height, std::int64_t width);

// Pieces [N,T,H,W,Ci] beside each other: [N,T,H,W,sum Ci].
Var join_channels(Context c, const std::vector<Var>& pieces);

// The sum of the terms, in their order: those of another size than the first are resized to it
// (bilinear).
Var sum_terms(Context c, const std::vector<Var>& terms);
// relu(sum_terms).
Var sum_relu(Context c, const std::vector<Var>& terms);

// Where an operation below overwrites its operand, nothing else may need that value: no other
// reader, and not the backward of what made it (a sigmoid needs its result, a convolution does
// not).

// a + b resized to a's size (nearest, ops/resize.h). Overwrites a.
Var add_upsampled(Context c, const Var& a, const Var& b);
// The maps [N,T,Hi,Wi,Ci], resized to the first's size (nearest), beside each other:
// [N,T,H0,W0,sum Ci].
Var join_upsampled(Context c, const std::vector<Var>& maps);

// Transposed convolution, kernel 2x2, stride 2: [N,T,H,W,in] -> [N,T,2H,2W,out]. Weights PyTorch's
// [in,out,2,2], bias [out] or none.
Var conv_transpose_2x2(Context c, const Var& x, const ConvWeights& w);

// 1 / (1 + e^-x).
Var sigmoid(Context c, const Var& x);

// x + by_channel[n,c] + by_pixel[n,t,h,w]: by_channel of N C values, as [N,1,1,1,C], by_pixel
// [N,T,H,W,1]; either may be null. Overwrites x.
Var add_outer(Context c, const Var& x, const Var& by_channel, const Var& by_pixel);
// Mean over the channels: [N,T,H,W,1].
Var channel_mean(Context c, const Var& x);
// x with its group g of C / G channels times a[n,t,h,w,g], a [N,T,H,W,G]. Overwrites x on a
// tape of mode `infer`.
Var scale_groups(Context c, const Var& x, const Var& a);

// x * keep[n, c], keep f32 [N,C]: dropout of whole channels, with the survivors' factor in `keep`.
// Undefined: x itself.
Var scale_channels(Context c, const Var& x, const Tensor& keep);

// Cross entropy of labels u8 [...] (0: none, v: class v - 1) under softmax(logits [...,C]), with
// weights of classes f32 [C], hard positions alone and Dice (ops/loss.h). Returns stats f64
// [ops::class_sums + 3 C]. The backward needs no start: it sends weight * the loss's gradient to
// the logits; without a label, 0.
Tensor class_loss(Context c, const Var& logits, const Tensor& labels, const Tensor& class_weights,
                  const ops::ClassLoss& loss, float weight);

// Loss of probability and threshold, logits [N,1,H,W,1], for flags and thresholds u8 [N,H,W]
// (ops/loss.h). Returns stats f64 [ops::text_stats]. The backward needs no start: it sends
// weight * the gradient of stats[ops::text_total] to both.
Tensor text_loss(Context c, const Var& probability, const Var& threshold, const Tensor& flags,
                 const Tensor& thresholds, float weight);

}  // namespace weft::nn
