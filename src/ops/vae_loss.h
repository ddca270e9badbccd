// What VAEs are trained for (specs/vae.md 4): absolute differences, KL divergence, LPIPS, and the PatchGAN's losses; with the
// pieces of VGG16 and of the discriminator that are no convolutions. Activations are f32 or bf16, channels last; arithmetic
// is f32, sums are made in f64 in an order that does not depend on the thread count. A gradient `weight` belongs to the
// whole loss: backward functions write weight * d(what forward adds for a weight of 1).
#pragma once

#include "ops/dispatch.h"

namespace weft::ops {

// loss f32 [1] += weight * sum |a - b|; a and b of one shape, types may differ.
WEFT_OP(l1_forward, void(const Tensor& a, const Tensor& b, float weight, Tensor& loss));
// da (+)= weight * sign(a - b), 0 where they are equal; b's gradient is that of l1 with a and b exchanged.
WEFT_OP(l1_backward,
        void(const Tensor& a, const Tensor& b, float weight, Tensor& da, bool accumulate));

// loss f32 [1] += weight * 0.5 * sum (mu^2 + exp(lv) - 1 - lv), lv clamped to [-30, 20], of moments [...,2C], mu in front.
WEFT_OP(kl_forward, void(const Tensor& moments, float weight, Tensor& loss));
// dmoments (+)= weight * (mu, 0.5 (exp(lv) - 1)); nothing where lv is clamped.
WEFT_OP(kl_backward, void(const Tensor& moments, float weight, Tensor& dmoments, bool accumulate));

// y = x where x > 0, else slope * x; slope 0 is ReLU. y may be x.
WEFT_OP(leaky_relu_forward, void(const Tensor& x, float slope, Tensor& y));
// dx = dy where y > 0, else slope * dy, by the result y, whose sign is x's for slope >= 0 (0 counts as below). dx may be dy.
WEFT_OP(leaky_relu_backward, void(const Tensor& y, float slope, const Tensor& dy, Tensor& dx));

// y [N,T,h,w,C] = greatest of each 2x2 rectangle of x [N,T,H,W,C], h = H / 2, w = W / 2 rounded down.
WEFT_OP(max_pool_forward, void(const Tensor& x, Tensor& y));
// dx is written: dy goes to the first greatest of each rectangle, in the order of rows, then columns; the rest is 0.
WEFT_OP(max_pool_backward, void(const Tensor& x, const Tensor& dy, Tensor& dx));

// LPIPS of one layer: loss f32 [1] += weight * the sum over frames of mean_p sum_c w[c] (a/(|a| + 1e-10) - b/(|b| + 1e-10))^2,
// |.| over the channels of a position. a, b [N,F,H,W,C] of one type, w f32 [C].
WEFT_OP(lpips_forward,
        void(const Tensor& a, const Tensor& b, const Tensor& w, float weight, Tensor& loss));
// db is written; it is 0 at positions where b is 0 in every channel. a is footage and needs none.
WEFT_OP(lpips_backward,
        void(const Tensor& a, const Tensor& b, const Tensor& w, float weight, Tensor& db));

// Losses of logits x with a sign s = +1 or -1: hinge max(0, 1 + s x); logistic log(1 + exp(s x)); linear s x.
enum class GanLoss { hinge, logistic, linear };
// loss f32 [1] += weight * mean of them.
WEFT_OP(gan_loss_forward,
        void(const Tensor& x, GanLoss kind, float sign, float weight, Tensor& loss));
// dx (+)= .
WEFT_OP(gan_loss_backward,
        void(const Tensor& x, GanLoss kind, float sign, float weight, Tensor& dx, bool accumulate));

// y (+)= a * x, of one shape; f32 or bf16 each. `factor` f32 [1], if defined, multiplies a: a number that only the device
// knows.
WEFT_OP(scaled_add,
        void(const Tensor& x, float a, const Tensor& factor, Tensor& y, bool accumulate));
// weight f32 [1] = a * min(|n| / (|g| + 1e-4), 1e4), |.| the L2 norms of n and g f32 (the adaptive weight of specs/vae.md 4).
WEFT_OP(adaptive_weight, void(const Tensor& n, const Tensor& g, float a, Tensor& weight));

}  // namespace weft::ops
