// AdamW with EMA in one pass over the flat state, and the global gradient norm.
#pragma once

#include "ops/dispatch.h"

namespace weft::ops {

struct AdamW {
  float lr, beta1, beta2, eps, weight_decay;
  float rest1, rest2;              // 1 - beta, rounded once: 1.0f - 0.999f is off by 1e-5 of itself
  float correction1, correction2;  // 1 - beta^step
  float grad_scale;                // clipping, and whatever else multiplies the gradient
  float ema_decay;                 // 0: `ema` is not touched
};

// p -= lr ((m/c1) / (sqrt(v/c2) + eps) + wd p), ema = d ema + (1-d) p, all f32 of one length
// (specs/training.md 7, 8). `ema` may be undefined; `copy` (bf16 working weights) too.
WEFT_OP(adamw_step, void(const AdamW& a, const Tensor& grad, Tensor& p, Tensor& m, Tensor& v,
                         Tensor& ema, Tensor& copy));
// Sum of squares in f64, in an order that does not depend on the thread count. Not finite if any element is not.
WEFT_OP(sum_of_squares, void(const Tensor& x, double& sum));

}  // namespace weft::ops
