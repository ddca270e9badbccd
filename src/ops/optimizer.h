// AdamW and SGD, each with EMA in one pass over the flat state, and the weights' running averages.
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
// (docs/models/stdit3.md, Optimizer). `ema` may be undefined; `copy` (bf16 working weights) too.
// `squares` f64 [1] is the global gradient's sum of squares: the gradient is scaled by min(1,
// grad_clip / (norm + 1e-6)), and nothing at all is changed where the sum is not finite, so that no
// host needs to look before the step.
WEFT_OP(adamw_step, void(const AdamW& a, const Tensor& squares, const Tensor& grad, Tensor& p,
                         Tensor& m, Tensor& v, Tensor& ema, Tensor& copy));

struct Sgd {
  float lr, momentum, weight_decay;
  float grad_clip;  // as AdamW's
  float ema_decay;  // 0: `ema` is not touched
  bool first;       // the first step: `v` holds nothing yet and is not read
};

// g = grad + wd p, v = momentum v + g (first step: g), p -= lr v, ema = d ema + (1-d) p, all f32 of
// one length: PyTorch's SGD without dampening, weight decay coupled. `squares`, `ema` and `copy` as
// adamw_step's; clipping scales grad, not the decay.
WEFT_OP(sgd_step, void(const Sgd& a, const Tensor& squares, const Tensor& grad, Tensor& p,
                       Tensor& v, Tensor& ema, Tensor& copy));

// average f32 [n] = decay * average + (1 - decay) * scale * the sum over the rows of rows[., first
// + i], f64 [rows, width]; a sum that is not finite changes nothing.
WEFT_OP(running_average, void(const Tensor& rows, std::int64_t width, std::int64_t first,
                              float scale, float decay, Tensor& average));

}  // namespace weft::ops
