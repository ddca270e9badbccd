// Feature maps as volumes, and pictures for the networks.
#pragma once

#include "tensor/tensor.h"

namespace weft {

// [N,D,h,w,C] of x [N,1,h,w,C*D], whose channel c D + d is channel c of slice d.
Tensor channels_to_depth(const Tensor& x, std::int64_t depth);

// f32 or bf16 [N,1,H,W,3] in 0 to 1 of pictures u8 [N,H,W,3].
Tensor picture_values(const Tensor& pictures, DType dtype);

// [N,T,H,W,A+B]: the channels of `a` [N,T,H,W,A], then those of `b`.
Tensor join_channels(const Tensor& a, const Tensor& b);

// [N,T,H/2,W/2,C]: means of 2x2 pixels of x.
Tensor halve(const Tensor& x);

}  // namespace weft
