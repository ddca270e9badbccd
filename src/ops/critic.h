// What may be added to a discriminator's loss (opensora/models/vae/losses.py at v1.2.0): LeCam, which holds its verdicts to
// running averages of those on the other side (Tseng et al., 2021), and the penalty on its gradient at real frames
// (Gulrajani et al., 2017). f32 inside; sums do not depend on the thread count.
#pragma once

#include "ops/dispatch.h"

namespace weft::ops {

// With d = sign * (mean - other), mean f32 [1] of a clip's logits and other f32 [1] the running average of the other side's:
// loss f32 [1] += weight * max(0, d)^2, and slope f32 [1] = its derivative by `mean` for a weight of 1. sign: +1 for real
// frames, -1 for made ones.
WEFT_OP(lecam, void(const Tensor& mean, const Tensor& other, float sign, float weight, Tensor& loss,
                    Tensor& slope));
// average f32 [n] = decay * average + (1 - decay) * scale * the sum over the rows of rows[., first + i], f64 [rows, width];
// a sum that is not finite changes nothing.
WEFT_OP(running_average, void(const Tensor& rows, std::int64_t width, std::int64_t first,
                              float scale, float decay, Tensor& average));

// g [1,F,...], the gradient at each frame: norms f32 [F] = its L2 norms, loss f32 [1] += weight * mean_f (norm - 1)^2.
WEFT_OP(gradient_penalty_forward, void(const Tensor& g, float weight, Tensor& norms, Tensor& loss));
// dg = weight * the derivative of that mean by g, 0 for a frame whose gradient is 0. dg may be g.
WEFT_OP(gradient_penalty_backward,
        void(const Tensor& g, const Tensor& norms, float weight, Tensor& dg));

}  // namespace weft::ops
