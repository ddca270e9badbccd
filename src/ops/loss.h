// Losses and their gradients: absolute differences, KL divergence, LPIPS, classes of pixels, the
// losses of a discriminator and its regularisers. Activations are f32 or bf16, channels last;
// arithmetic is f32, and sums are f64 in an order that does not depend on the thread count.
// `weight` multiplies the whole loss: backward functions write weight * d(what forward adds for a
// weight of 1).
#pragma once

#include "ops/dispatch.h"

namespace weft::ops {

// loss f32 [1] += weight * sum |a - b|; a and b of one shape, types may differ.
WEFT_OP(l1_forward, void(const Tensor& a, const Tensor& b, float weight, Tensor& loss));
// da (+)= weight * sign(a - b), 0 where they are equal; b's gradient is that of l1 with a and b
// exchanged.
WEFT_OP(l1_backward,
        void(const Tensor& a, const Tensor& b, float weight, Tensor& da, bool accumulate));

// loss f32 [1] += weight * 0.5 * sum (mu^2 + exp(lv) - 1 - lv), lv clamped to [-30, 20], of moments
// [...,2C], mu in front.
WEFT_OP(kl_forward, void(const Tensor& moments, float weight, Tensor& loss));
// dmoments (+)= weight * (mu, 0.5 (exp(lv) - 1)); nothing where lv is clamped.
WEFT_OP(kl_backward, void(const Tensor& moments, float weight, Tensor& dmoments, bool accumulate));

// LPIPS of one layer: loss f32 [1] += weight * the sum over frames of mean_p sum_c w[c] (a/(|a| +
// 1e-10) - b/(|b| + 1e-10))^2,
// |.| over the channels of a position. a, b [N,F,H,W,C] of one type, w f32 [C].
WEFT_OP(lpips_forward,
        void(const Tensor& a, const Tensor& b, const Tensor& w, float weight, Tensor& loss));
// db is written; it is 0 at positions where b is 0 in every channel. a is real footage and needs
// none.
WEFT_OP(lpips_backward,
        void(const Tensor& a, const Tensor& b, const Tensor& w, float weight, Tensor& db));

// Classes of positions, from logits [...,C]. labels u8 [...]: v > 0 is class v - 1, 0 is ignored; C
// <= 255. stats f64 [3] += the sum over the labelled positions of -log softmax(logits)[class], how
// many they are, and at how many of them the class has the greatest logit (the first of equal
// ones). A label above C makes the first NaN.
WEFT_OP(nll_forward, void(const Tensor& logits, const Tensor& labels, Tensor& stats));
// dlogits = weight / stats[1] * (softmax(logits) - onehot(class)) where a label is, 0 elsewhere.
WEFT_OP(nll_backward, void(const Tensor& logits, const Tensor& labels, const Tensor& stats,
                           float weight, Tensor& dlogits));
// What a step reports of these stats: with loss = mean over the labelled positions (0 without any),
// losses f32 [n] = loss of `main` + scale * loss of `aux`, terms f32 [2 or 3] = n times the share
// of positions that are right, the loss of main, and that of aux where it is defined.
WEFT_OP(nll_summary,
        void(const Tensor& main, const Tensor& aux, float scale, Tensor& losses, Tensor& terms));

// Losses of logits x with a sign s = +1 or -1: hinge max(0, 1 + s x); logistic log(1 + exp(s x));
// linear s x.
enum class GanLoss { hinge, logistic, linear };
// loss f32 [1] += weight * mean of them.
WEFT_OP(gan_loss_forward,
        void(const Tensor& x, GanLoss kind, float sign, float weight, Tensor& loss));
// dx (+)= .
WEFT_OP(gan_loss_backward,
        void(const Tensor& x, GanLoss kind, float sign, float weight, Tensor& dx, bool accumulate));

// weight f32 [1] = a * min(|n| / (|g| + 1e-4), 1e4), |.| the L2 norms of n and g f32 (the adaptive
// weight of docs/models/video_vae.md, Losses).
WEFT_OP(adaptive_weight, void(const Tensor& n, const Tensor& g, float a, Tensor& weight));

// With d = sign * (mean - other), mean f32 [1] of a clip's logits and other f32 [1] the running
// average of the other side's: loss f32 [1] += weight * max(0, d)^2, and slope f32 [1] = its
// derivative by `mean` for a weight of 1. sign: +1 for real frames, -1 for fake ones.
WEFT_OP(lecam, void(const Tensor& mean, const Tensor& other, float sign, float weight, Tensor& loss,
                    Tensor& slope));

// g [1,F,...], the gradient at each frame: norms f32 [F] = its L2 norms, loss f32 [1] += weight *
// mean_f (norm - 1)^2.
WEFT_OP(gradient_penalty_forward, void(const Tensor& g, float weight, Tensor& norms, Tensor& loss));
// dg = weight * the derivative of that mean by g, 0 for a frame whose gradient is 0. dg may be g.
WEFT_OP(gradient_penalty_backward,
        void(const Tensor& g, const Tensor& norms, float weight, Tensor& dg));

}  // namespace weft::ops
