// Spatially adaptive normalisation (SPADE, arXiv:1903.07291) over channels-last frames, f32 or
// bf16: an instance norm whose scale and shift are maps. Arithmetic is f32.
//
// A block's sum with a residual of half its size is ops/resize.h's nearest_forward, which adds.
#pragma once

#include "ops/dispatch.h"

namespace weft::ops {

// Positions of a sample are summed in pieces, which are put together in order.
struct InstancePieces {
  std::int64_t length, count;
};
InstancePieces instance_pieces(std::int64_t positions);

// statistics f32 [N,2,C] = (mean, 1 / sqrt(biased variance + 1e-5)) of each channel over all
// positions of a sample of x [N,T,H,W,C]. The sums do not cancel, and their order depends on the
// shape alone. A map seen nearest at twice its size has the statistics of the map.
constexpr float instance_norm_eps = 1e-5f;
WEFT_SCRATCH_OP(instance_statistics, void(const Tensor& x, Tensor& statistics));

// y [N,1,H,W,C] = leaky((x - mean) rstd (1 + gamma) + beta), leaky(v) = v < 0 ? slope v : v (slope
// 1: v). gamma_beta [N,1,H,W,2C] has gamma, then beta. With `upsample` x is [N,1,H/2,W/2,C], read
// nearest at twice its size. y may be x without `upsample`.
WEFT_OP(spade, void(const Tensor& x, const Tensor& statistics, const Tensor& gamma_beta,
                    bool upsample, float slope, Tensor& y));

}  // namespace weft::ops
