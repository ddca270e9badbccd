// Normal numbers, and draws from Gaussians given by their moments. Tensors are f32 or bf16,
// arithmetic is f32.
#pragma once

#include "ops/pointwise.h"

namespace weft::ops {

// eps f32 [count] = standard normals of Philox(seed, purpose, step, sample).
WEFT_OP(fill_normal, void(std::uint64_t seed, int purpose, std::uint64_t step, std::uint64_t sample,
                          Tensor& eps));

// Log variances, lv, are clamped to these.
constexpr float lowest_log_variance = -30.0f, highest_log_variance = 20.0f;

// z = (mu + exp(clamp(lv) / 2) * eps) * a[c] + b[c] (docs/models/video_vae.md, Posterior,
// Scaling and normalisation, Derivatives). moments hold 2C channels, mu in front of lv; z has C;
// eps f32 of z's shape, undefined for the mean alone; affine f32 [2,C] = (a, b), undefined for 1
// and 0. Moments and z may differ in type.
WEFT_OP(posterior_draw_forward, void(const Tensor& moments, const Tensor& eps, const Tensor& affine,
                                     Channels channels, Tensor& z));
// dmoments (+)= ; lv gets nothing where it is clamped.
WEFT_OP(posterior_draw_backward,
        void(const Tensor& moments, const Tensor& eps, const Tensor& affine, Channels channels,
             const Tensor& dz, Tensor& dmoments, bool accumulate));

// y = moments with lv clamped. y may be moments.
WEFT_OP(clamp_log_variance_forward, void(const Tensor& moments, Channels channels, Tensor& y));
WEFT_OP(clamp_log_variance_backward, void(const Tensor& moments, Channels channels,
                                          const Tensor& dy, Tensor& dmoments, bool accumulate));

}  // namespace weft::ops
