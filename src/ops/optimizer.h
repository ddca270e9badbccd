// AdamW with EMA in one pass over the flat state, and the global gradient norm.
#pragma once

#include "ops/dispatch.h"

namespace weft::ops {

struct AdamW {
  float lr, beta1, beta2, eps, weight_decay;
  float rest1, rest2;              // 1 - beta, rounded once: 1.0f - 0.999f is off by 1e-5 of itself
  float correction1, correction2;  // 1 - beta^step
  float grad_clip;                 // largest L2 norm of the gradient; 0: not clipped
  float ema_decay;                 // 0: `ema` is not touched
};

// p -= lr ((m/c1) / (sqrt(v/c2) + eps) + wd p), ema = d ema + (1-d) p, all f32 of one length
// (specs/training.md 7, 8). `ema` may be undefined; `copy` (bf16 working weights) too. `squares` f64 [1] is the global
// gradient's sum of squares: the gradient is scaled by min(1, grad_clip / (norm + 1e-6)), and nothing at all is changed
// where the sum is not finite, so that no host needs to look before the step.
WEFT_OP(adamw_step, void(const AdamW& a, const Tensor& squares, const Tensor& grad, Tensor& p,
                         Tensor& m, Tensor& v, Tensor& ema, Tensor& copy));
// sum f64 [1] = sum of squares of x (added to what is there if `accumulate`), in an order that does not depend on the thread
// count. Not finite if any element is not.
WEFT_OP(sum_of_squares, void(const Tensor& x, Tensor& sum, bool accumulate));

// sum f64 [1] = 0 if it and all `values` f64 are finite, else NaN: to start a sum of squares with, so that one step that went
// wrong keeps all later ones from changing anything.
WEFT_OP(carry_non_finite, void(const Tensor& values, Tensor& sum));

}  // namespace weft::ops
