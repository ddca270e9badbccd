// Sampling and keypoints of feature volumes, for the motion of a face renderer
// (docs/models/sadtalker.md). Volumes are channels-last [N,D,H,W,C], f32 or bf16; coordinates and
// keypoints are f32 (x,y,z), and arithmetic is f32.
//
// Grid: voxel i of an axis of n lies at 2 i / (n - 1) - 1, so that the corners are -1 and 1 (an
// axis of one voxel: -1). Samples, though, are read as PyTorch's grid_sample does with
// align_corners=False, its default: v is voxel ((v + 1) n - 1) / 2. The two do not agree, and
// sampling at the grid itself is not the identity: the networks were trained so.
//
// The means of 2x2 pixels of each slice, depth unchanged, are ops/pool.h's average_pool_2x2.
#pragma once

#include <cmath>

#include "ops/dispatch.h"

namespace weft::ops {

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
WEFT_OP(volume_sample, void(const Tensor& x, const Tensor& grid, Tensor& y));

// What a motion network sees of each frame: y [N,D,H,W,(K+1)*(1+c)] has for each of K+1 candidates
// a heatmap's value, then the c channels of the features [1,D,H,W,c] at the candidate's motion.
//   candidate 0      the background: heatmap 0, motion g
//   candidate k + 1  heatmap exp(-|g - drv_k|^2 / 0.02) - exp(-|g - src_k|^2 / 0.02),
//                    motion g - drv_k + src_k
// with g the voxel's place on the grid, src = kp_source [1,K,3], drv = kp_driving [N,K,3].
constexpr float heatmap_variance = 0.01f;
WEFT_OP(motion_candidates,
        void(const Tensor& features, const Tensor& kp_source, const Tensor& kp_driving, Tensor& y));

// mask [N,D,H,W,K+1] = softmax over the candidates of logits [N,D,H,W,K+1]; f32 or of the logits'
// type; undefined: not wanted. deformation f32 [N,D,H,W,3] = sum of mask_k times the candidates'
// motions above, where a mask below `threshold` counts as 0 and the others stay as they are.
WEFT_OP(motion_field, void(const Tensor& logits, const Tensor& kp_source, const Tensor& kp_driving,
                           float threshold, Tensor& mask, Tensor& deformation));

// A GPU takes the voxels in pieces, whose sums are put together in order.
struct VolumePieces {
  std::int64_t length, count;
};
VolumePieces volume_pieces(std::int64_t voxels);

// keypoints f32 [N,K,3] = expectation of the grid's (x,y,z) under the softmax over all D*H*W voxels
// of logits [N,D,H,W,K] / temperature. The order of the sums does not depend on the thread count.
WEFT_SCRATCH_OP(volume_expectation,
                void(const Tensor& logits, float temperature, Tensor& keypoints));

}  // namespace weft::ops
