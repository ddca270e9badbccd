// Rectified flow: interpolation, masked velocity loss, sampler steps; and clip conversion.
#pragma once

#include "ops/dispatch.h"

namespace weft::ops {

// xs = (1-s) x0 + s eps with s = tau/1000, per sample; frames with mask 0 are x0 (rectified_flow.md 3.3, 3.4).
// x0, eps, xs f32 [B,C,T,H,W]; tau f32 [B]; mask u8 [B,T] or undefined (all ones). xs may be x0.
WEFT_OP(flow_interpolate, void(const Tensor& x0, const Tensor& eps, const Tensor& tau,
                               const Tensor& mask, Tensor& xs));
// loss f32 [B] = mean over C,H,W and the frames with mask 1 of (v - (x0 - eps))^2, v = channels [0,C) of out
// f32 [B,Co,T,H,W] (3.6). f64 accumulation. A sample without any masked frame has loss 0.
WEFT_OP(velocity_loss_forward, void(const Tensor& out, const Tensor& x0, const Tensor& eps,
                                    const Tensor& mask, Tensor& loss));
// total f64 [1] += sum of x f32, in order.
WEFT_OP(add_sum, void(const Tensor& x, Tensor& total));
// dout = weight * d(sum of loss): zero for channels >= C and for frames with mask 0.
WEFT_OP(velocity_loss_backward, void(const Tensor& out, const Tensor& x0, const Tensor& eps,
                                     const Tensor& mask, float weight, Tensor& dout));

// eps f32 [count] = standard normals of Philox(seed, purpose, step, sample).
WEFT_OP(fill_normal, void(std::uint64_t seed, int purpose, std::uint64_t step, std::uint64_t sample,
                          Tensor& eps));

// x0 f32 [3,T,H,W] = frames u8 [T,H,W,3] / 127.5 - 1.
WEFT_OP(frames_to_latent, void(const Tensor& frames, Tensor& x0));
// And back for people to look at: pixels u8 [T,H,W,3] = (frames f32 in [-1,1], clamped) to 256 levels, halves up
// (inference.md 6); 0 where a value is not finite, and bad i32 [T] += how many of the frame's are not.
WEFT_OP(frames_to_pixels, void(const Tensor& frames, Tensor& pixels, Tensor& bad));

// z += (vu + g (vc - vu)) * dt[b] on frames with act 1: one Euler step with guidance. out f32 [2B,Co,T,H,W] (conditional
// half first), z f32 [B,C,T,H,W], dt f32 [B], act u8 [B,T] (undefined: all).
WEFT_OP(guided_euler_step,
        void(const Tensor& out, float guidance, const Tensor& dt, const Tensor& act, Tensor& z));

}  // namespace weft::ops
