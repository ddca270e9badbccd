// What a network that classifies or scores pixels says of an image, and how well it does.
#pragma once

#include <span>

#include "ops/dispatch.h"

namespace weft::ops {

// The class of every pixel of an image of H x W from the logits [1,1,h,w,C], f32 or bf16, that it
// got at several scales, C <= 255: each scale's logits are resized to H x W (bilinear,
// ops/resize.h), the means over the scales of their softmax are the scores, and prediction u8 [H,W]
// is the class of the greatest score, the first of equal ones. At most 16 scales.
// labels u8 [H,W], 0 for none and v for class v - 1, may be undefined; those above C count as none;
// counts i64 [3,C] += how many of the labelled pixels of each class are predicted rightly, are
// predicted, are labelled. scores f32 [C,H,W] is written if it is defined; otherwise they exist for
// a few pixels at a time.
WEFT_OP(predict_classes, void(Tensor& prediction, std::span<const Tensor> logits,
                              const Tensor& labels, Tensor& counts, Tensor& scores));
constexpr std::size_t most_scales = 16;

// counts i32 [N]: how many values of each x[n] are above the threshold, x [N,...] f32 or bf16 with
// fewer than 2^31 values each. A NaN is not.
WEFT_OP(count_above, void(const Tensor& x, float threshold, Tensor& counts));

}  // namespace weft::ops
