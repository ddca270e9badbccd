// Pooling over channels-last frames.
#pragma once

#include "ops/dispatch.h"

namespace weft::ops {

// y [N,T,h,w,C] = greatest of each 2x2 rectangle of x [N,T,H,W,C], h = H / 2, w = W / 2 rounded
// down.
WEFT_OP(max_pool_forward, void(const Tensor& x, Tensor& y));
// dx is written: dy goes to the first greatest of each rectangle, in the order of rows, then
// columns; the rest is 0.
WEFT_OP(max_pool_backward, void(const Tensor& x, const Tensor& dy, Tensor& dx));

}  // namespace weft::ops
