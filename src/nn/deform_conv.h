// Deformable convolution (DCNv2) on the tape.
#pragma once

#include "nn/conv.h"

namespace weft::nn {

// x [N,T,H,W,C] and offsets [N,T,h,w,27] of its type (ops/conv/deform.h: 18 offsets, then 9 logits
// of masks), w.weight [out,C,3,3] without bias -> [N,T,h,w,out]. The geometry's kernel is 3x3 with
// one group; it is also that of the convolution that makes the offsets. Gradients go to x, offsets
// and the weight; the same inputs give the same bits.
//
// Columns [pixels, 9 C] are made for a band of pixels at a time and multiplied by the weights:
// beside the result this takes deform_scratch bytes of the arena. The backward takes that once for
// columns or their gradient and once for x's gradient in f32, which is made for as many frames at a
// time as fit in there, but at least one; on a GPU also the lists of ops/conv/deform.h, less than
// half of it.
Var deform_conv(Context c, const Var& x, const Var& offsets, const ConvWeights& w,
                ops::Conv geometry);

// 64 MiB. Tests set less, to have several bands.
extern std::int64_t deform_scratch;

}  // namespace weft::nn
