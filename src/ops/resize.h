// Resampling of channels-last frames and volumes: bilinear and nearest resizing, reflected borders,
// pooling, sampling at given places. Activations are f32 or bf16, arithmetic is f32.
//
// Bilinear: pixels are areas (PyTorch's align_corners=False). Along an axis of `in` pixels made
// `out`, pixel o lies at max((o + 0.5) in / out - 0.5, 0) and takes its two neighbours there by
// their distances; beyond the last pixel that one counts alone. Nothing is averaged: made smaller,
// pixels are skipped.
#pragma once

#include <cmath>

#include "ops/dispatch.h"

namespace weft::ops {

// The two pixels that make one, and the second's share.
struct BilinearTap {
  int first, second;
  float share;
};
#ifdef __CUDACC__
__host__ __device__
#endif
    inline BilinearTap
    bilinear_tap(int to, float ratio, int in) {
  const float at = ratio * (static_cast<float>(to) + 0.5f) - 0.5f;
  const float from = at < 0.0f ? 0.0f : at;
  int first = static_cast<int>(from);
  if (first > in - 1) first = in - 1;  // by rounding
  const float share = from - static_cast<float>(first);
  return {first, first + 1 < in ? first + 1 : first, share < 1.0f ? share : 1.0f};
}
inline float bilinear_ratio(std::int64_t in, std::int64_t out) {
  return static_cast<float>(in) / static_cast<float>(out);
}

// y [N,T,H,W,C] (+)= x [N,T,h,w,C] resized, of one type.
WEFT_MEMORY_OP(bilinear_forward, void(const Tensor& x, Tensor& y, bool accumulate));
// dx (+)= the transpose of that.
WEFT_MEMORY_OP(bilinear_backward, void(const Tensor& dy, Tensor& dx, bool accumulate));

// Nearest: along an axis of `in` pixels made `out`, pixel o is pixel floor(o in / out) (PyTorch's
// "nearest"), which is thus the source of the pixels [first(i), first(i + 1)).
#ifdef __CUDACC__
__host__ __device__
#endif
    constexpr std::int64_t
    nearest_source(std::int64_t o, std::int64_t in, std::int64_t out) {
  return o * in / out;
}
#ifdef __CUDACC__
__host__ __device__
#endif
    constexpr std::int64_t
    nearest_first(std::int64_t i, std::int64_t in, std::int64_t out) {
  return (i * out + in - 1) / in;
}

// Channels [first, first + c) of y [N,T,H,W,C] (+)= x [N,T,h,w,c] resized, of one type; its other
// channels stay.
WEFT_MEMORY_OP(nearest_forward,
               void(const Tensor& x, std::int64_t first, Tensor& y, bool accumulate));
// dx [N,T,h,w,c] (+)= the transpose of that over the channels [first, first + c) of dy
// [N,T,H,W,C].
WEFT_MEMORY_OP(nearest_backward,
               void(const Tensor& dy, std::int64_t first, Tensor& dx, bool accumulate));

// Pixel `o` of an axis of n >= 2 pixels that has one more at each end, mirrored at the pixel there
// (PyTorch's ReflectionPad2d(1)).
#ifdef __CUDACC__
__host__ __device__
#endif
    constexpr std::int64_t
    reflected_source(std::int64_t o, std::int64_t n) {
  return o == 0 ? 1 : o > n ? n - 2 : o - 1;
}

// y [N,T,up H + 2,up W + 2,C] = x [N,T,H,W,C] seen at `up` (1 or 2) times its height and width
// (nearest), in such a border; of one type. up H and up W are 2 or more.
WEFT_MEMORY_OP(reflect_border, void(const Tensor& x, int up, Tensor& y));

// Pooling over channels-last frames [N,T,H,W,C], f32 or bf16.

// y [N,T,h,w,C] = greatest of each 2x2 rectangle of x [N,T,H,W,C], h = H / 2, w = W / 2 rounded
// down.
WEFT_MEMORY_OP(max_pool_forward, void(const Tensor& x, Tensor& y));
// dx is written: dy goes to the first greatest of each rectangle, in the order of rows, then
// columns; the rest is 0.
WEFT_MEMORY_OP(max_pool_backward, void(const Tensor& x, const Tensor& dy, Tensor& dx));

// y [N,T,H/2,W/2,C] = mean of each 2x2 square of x [N,T,H,W,C], H and W even.
WEFT_MEMORY_OP(average_pool_2x2_forward, void(const Tensor& x, Tensor& y));
// dx (+)= the transpose of that.
WEFT_MEMORY_OP(average_pool_2x2_backward, void(const Tensor& dy, Tensor& dx, bool accumulate));

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
WEFT_MEMORY_OP(max_pool_window_forward, void(const Tensor& x, PoolWindow window, Tensor& y));
// dx is written, the first greatest of a square as above. Squares overlap where stride < size: dx
// is the sum, in f32, in the squares' order.
WEFT_MEMORY_OP(max_pool_window_backward,
               void(const Tensor& x, PoolWindow window, const Tensor& dy, Tensor& dx));

// y [N,T,h,w,C] = mean over each of h x w rectangles of x [N,T,H,W,C] of any size: number i of n
// along an axis of L pixels is [floor(i L / n), ceil((i + 1) L / n)), so that neighbours may
// overlap.
WEFT_MEMORY_OP(adaptive_pool_forward, void(const Tensor& x, Tensor& y));
// dx (+)= the transpose of that.
WEFT_MEMORY_OP(adaptive_pool_backward, void(const Tensor& dy, Tensor& dx, bool accumulate));

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

// Sampling and keypoints of feature volumes, for the motion of a face renderer
// (docs/models/sadtalker.md). Volumes are channels-last [N,D,H,W,C], f32 or bf16; coordinates and
// keypoints are f32 (x,y,z), and arithmetic is f32.
//
// Grid: voxel i of an axis of n lies at 2 i / (n - 1) - 1, so that the corners are -1 and 1 (an
// axis of one voxel: -1). Samples, though, are read as PyTorch's grid_sample does with
// align_corners=False, its default: v is voxel ((v + 1) n - 1) / 2. The two do not agree, and
// sampling at the grid itself is not the identity: the networks were trained so.
//
// The means of 2x2 pixels of each slice, depth unchanged, are average_pool_2x2_forward's.

#ifdef __CUDACC__
__host__ __device__
#endif
    inline float
    volume_coordinate(int i, int n) {
  return 2.0f * static_cast<float>(i) / static_cast<float>(n > 1 ? n - 1 : 1) - 1.0f;
}

// What coordinate v reads on an axis of n voxels: two neighbours and their shares. A neighbour
// outside has share 0 and is named as the last voxel inside, so that both can always be read.
struct VolumeTap {
  int voxel[2];
  float share[2];
};
#ifdef __CUDACC__
__host__ __device__
#endif
    inline VolumeTap
    volume_tap(float v, int n) {
  const auto length = static_cast<float>(n);
  const float at = ((v + 1.0f) * length - 1.0f) * 0.5f;
  // Written so that a NaN is outside.
  if (!(at > -1.0f && at < length)) return {{0, 0}, {0.0f, 0.0f}};
  const float floor = std::floor(at), share = at - floor;
  const int first = static_cast<int>(floor), last = n - 1;
  return {{first < 0 ? 0 : first, first < last ? first + 1 : last},
          {first < 0 ? 0.0f : 1.0f - share, first < last ? share : 0.0f}};
}

// y [N,D,H,W,C] = x [M,d,h,w,C] at grid f32 [N,D,H,W,3]: trilinear, what lies outside is 0. M = 1
// (all read the same volume) or N.
WEFT_MEMORY_OP(volume_sample, void(const Tensor& x, const Tensor& grid, Tensor& y));

// What a motion network sees of each frame: y [N,D,H,W,(K+1)*(1+c)] has for each of K+1 candidates
// a heatmap's value, then the c channels of the features [1,D,H,W,c] at the candidate's motion.
//   candidate 0      the background: heatmap 0, motion g
//   candidate k + 1  heatmap exp(-|g - drv_k|^2 / 0.02) - exp(-|g - src_k|^2 / 0.02),
//                    motion g - drv_k + src_k
// with g the voxel's place on the grid, src = kp_source [1,K,3], drv = kp_driving [N,K,3].
constexpr float heatmap_variance = 0.01f;
WEFT_MEMORY_OP(motion_candidates, void(const Tensor& features, const Tensor& kp_source,
                                       const Tensor& kp_driving, Tensor& y));

// mask [N,D,H,W,K+1] = softmax over the candidates of logits [N,D,H,W,K+1]; f32 or of the logits'
// type; undefined: not wanted. deformation f32 [N,D,H,W,3] = sum of mask_k times the candidates'
// motions above, where a mask below `threshold` counts as 0 and the others stay as they are.
WEFT_MEMORY_OP(motion_field,
               void(const Tensor& logits, const Tensor& kp_source, const Tensor& kp_driving,
                    float threshold, Tensor& mask, Tensor& deformation));

// A GPU takes the voxels in pieces, whose sums are put together in order.
struct VolumePieces {
  std::int64_t length, count;
};
VolumePieces volume_pieces(std::int64_t voxels);

// keypoints f32 [N,K,3] = expectation of the grid's (x,y,z) under the softmax over all D*H*W voxels
// of logits [N,D,H,W,K] / temperature. The order of the sums does not depend on the thread count.
WEFT_SCRATCH_OP(volume_expectation,
                void(const Tensor& logits, float temperature, Tensor& keypoints), memory_bound());

}  // namespace weft::ops
