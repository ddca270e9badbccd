// Pooling over channels-last frames [N,T,H,W,C], f32 or bf16.
#pragma once

#include "ops/dispatch.h"

namespace weft::ops {

// y [N,T,h,w,C] = greatest of each 2x2 rectangle of x [N,T,H,W,C], h = H / 2, w = W / 2 rounded
// down.
WEFT_OP(max_pool_forward, void(const Tensor& x, Tensor& y));
// dx is written: dy goes to the first greatest of each rectangle, in the order of rows, then
// columns; the rest is 0.
WEFT_OP(max_pool_backward, void(const Tensor& x, const Tensor& dy, Tensor& dx));

// y [N,T,H/2,W/2,C] = mean of each 2x2 square of x [N,T,H,W,C], H and W even.
WEFT_OP(average_pool_2x2_forward, void(const Tensor& x, Tensor& y));
// dx (+)= the transpose of that.
WEFT_OP(average_pool_2x2_backward, void(const Tensor& dy, Tensor& dx, bool accumulate));

// Squares of size x size pixels, `stride` apart, the first `padding` pixels (fewer than `size`)
// beyond the corner. What lies outside x counts for nothing.
struct PoolWindow {
  int size, stride, padding;
  // Squares along an axis: those that end before the padding does.
  std::int64_t count(std::int64_t length) const {
    return (length + 2 * padding - size) / stride + 1;
  }
};
// y [N,T,count(H),count(W),C] = greatest of each square of x.
WEFT_OP(max_pool_window_forward, void(const Tensor& x, PoolWindow window, Tensor& y));
// dx is written, the first greatest of a square as above. Squares overlap where stride < size: dx
// is the sum, in f32, in the squares' order.
WEFT_OP(max_pool_window_backward,
        void(const Tensor& x, PoolWindow window, const Tensor& dy, Tensor& dx));

// y [N,T,h,w,C] = mean over each of h x w rectangles of x [N,T,H,W,C] of any size: number i of n
// along an axis of L pixels is [floor(i L / n), ceil((i + 1) L / n)), so that neighbours may
// overlap.
WEFT_OP(adaptive_pool_forward, void(const Tensor& x, Tensor& y));
// dx (+)= the transpose of that.
WEFT_OP(adaptive_pool_backward, void(const Tensor& dy, Tensor& dx, bool accumulate));

// Pixels of rectangle i of n; and the rectangles that pixel p is in, which turns out to be the same
// formula with n and L exchanged.
struct PoolRange {
  std::int64_t begin, end;
};
#ifdef __CUDACC__
__host__ __device__
#endif
    constexpr PoolRange
    adaptive_range(std::int64_t i, std::int64_t n, std::int64_t L) {
  return {i * L / n, ((i + 1) * L + n - 1) / n};
}

}  // namespace weft::ops
