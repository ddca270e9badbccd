// Normal numbers, draws from Gaussians given by their moments, and diffusion, which adds noise and
// takes it away. Tensors are f32 or bf16,
// arithmetic is f32.
#pragma once

#include "ops/dispatch.h"
#include "ops/pointwise.h"

namespace weft::ops {

// eps f32 [count] = standard normals of Philox(seed, purpose, step, sample).
WEFT_MEMORY_OP(fill_normal, void(std::uint64_t seed, int purpose, std::uint64_t step,
                                 std::uint64_t sample, Tensor& eps));

// Log variances, lv, are clamped to these.
constexpr float lowest_log_variance = -30.0f, highest_log_variance = 20.0f;

// z = (mu + exp(clamp(lv) / 2) * eps) * a[c] + b[c] (docs/models/video_vae.md, Posterior,
// Scaling and normalisation, Derivatives). moments hold 2C channels, mu in front of lv; z has C;
// eps f32 of z's shape, undefined for the mean alone; affine f32 [2,C] = (a, b), undefined for 1
// and 0. Moments and z may differ in type.
WEFT_MEMORY_OP(posterior_draw_forward, void(const Tensor& moments, const Tensor& eps,
                                            const Tensor& affine, Channels channels, Tensor& z));
// dmoments (+)= ; lv gets nothing where it is clamped.
WEFT_MEMORY_OP(posterior_draw_backward,
               void(const Tensor& moments, const Tensor& eps, const Tensor& affine,
                    Channels channels, const Tensor& dz, Tensor& dmoments, bool accumulate));

// y = moments with lv clamped. y may be moments.
WEFT_MEMORY_OP(clamp_log_variance_forward,
               void(const Tensor& moments, Channels channels, Tensor& y));
WEFT_MEMORY_OP(clamp_log_variance_backward,
               void(const Tensor& moments, Channels channels, const Tensor& dy, Tensor& dmoments,
                    bool accumulate));

// Diffusion on latents [B,C,T,H,W]: interpolation with noise, the masked velocity loss, sampler
// steps.

// xs = (1-s) x0 + s eps with s = tau/1000, per sample; frames with mask 0 are x0
// (docs/models/stdit3.md, Training loss). x0, eps, xs f32 [B,C,T,H,W]; tau f32 [B]; mask u8 [B,T]
// or undefined (all ones). xs may be x0.
WEFT_MEMORY_OP(flow_interpolate, void(const Tensor& x0, const Tensor& eps, const Tensor& tau,
                                      const Tensor& mask, Tensor& xs));
// loss f32 [B] = mean over C,H,W and the frames with mask 1 of (v - (x0 - eps))^2, v = channels
// [0,C) of out f32 [B,Co,T,H,W]. f64 accumulation. A sample without any masked frame has loss
// 0.
WEFT_MEMORY_OP(velocity_loss_forward, void(const Tensor& out, const Tensor& x0, const Tensor& eps,
                                           const Tensor& mask, Tensor& loss));
// dout = weight * d(sum of loss), weight f32 [1]: zero for channels >= C and for frames with mask
// 0.
WEFT_MEMORY_OP(velocity_loss_backward,
               void(const Tensor& out, const Tensor& x0, const Tensor& eps, const Tensor& mask,
                    const Tensor& weight, Tensor& dout));

// z += (vu + g (vc - vu)) * dt[b] on frames with act 1: one Euler step with guidance. out f32
// [2B,Co,T,H,W] (conditional half first; [B,...]: no guidance, vu is vc), z f32 [B,C,T,H,W], dt f32
// [B], act u8 [B,T] (undefined: all).
WEFT_MEMORY_OP(guided_euler_step, void(const Tensor& out, float guidance, const Tensor& dt,
                                       const Tensor& act, Tensor& z));

}  // namespace weft::ops
