// Batch norm over activations [..., C], seen as [P,C]: P positions of all samples (docs/models/
// segmentation.md, Batch norm). In parts, so that ranks can add up their sums between them:
//   forward   batch_norm_sums, (the ranks' sums,) batch_norm_statistics, batch_norm_apply
//   backward  batch_norm_backward_sums, (the ranks' sums,) batch_norm_backward
// x, y, dy and their like are f32 or bf16, of one type; what is kept per channel is f32.
#pragma once

#include "ops/dispatch.h"

namespace weft::ops {

enum class Activation { none, relu, relu6 };

// What u = xhat gamma + beta is clamped to; the gradient passes strictly between.
struct ActivationRange {
  float low, high;
};
ActivationRange range_of(Activation act);

// Positions are summed in pieces of `rows`, by shape alone: a piece in f32, as differences from the
// first position where squares would cancel; the pieces in f64, in order.
struct BatchNormPieces {
  std::int64_t rows, count;
};
BatchNormPieces batch_norm_pieces(const Tensor& x);

// sums f64 [2C+1] = sum of x, sum of x^2, P.
WEFT_SCRATCH_OP(batch_norm_sums, void(const Tensor& x, Tensor& sums));

// ordinary: xhat = (x - mean) / sqrt(var + eps), and running = (1 - m) running + m new.
// synchronised: xhat = (x - mean) / sqrt(max(var, eps)); tmp = (1 - m) tmp + new, iter = (1 - m)
// iter + 1, running = tmp / iter.
// The running variance is the unbiased one, of at least two positions.
enum class BatchNormForm { ordinary, synchronised };

// stats f32 [4,C] = mean, 1/sigma, and what the backward takes of the two sums' means: 1/P each, or
// 0 for the second where the variance was clamped (below eps). From `sums` as above, of all ranks.
// Running mean, variance, their tmp [C] and iter [1] are updated where given, tmp and iter only in
// the synchronised form.
WEFT_OP(batch_norm_statistics,
        void(const Tensor& sums, BatchNormForm form, float eps, float momentum, Tensor& stats,
             Tensor& running_mean, Tensor& running_var, Tensor& tmp_mean, Tensor& tmp_var,
             Tensor& iter));
// The same from the running statistics: 1 / sqrt(running_var + eps), on which no x has influence:
// rows 2 and 3 are 0.
WEFT_OP(batch_norm_running_statistics,
        void(const Tensor& running_mean, const Tensor& running_var, float eps, Tensor& stats));

// y = act((x - mean) (gamma / sigma) + beta + r): r is `residual`, or nothing where that is
// undefined, or, with residual_stats, residual_gamma and residual_beta given, its batch norm.
WEFT_OP(batch_norm_apply,
        void(const Tensor& x, const Tensor& stats, const Tensor& gamma, const Tensor& beta,
             const Tensor& residual, const Tensor& residual_stats, const Tensor& residual_gamma,
             const Tensor& residual_beta, Activation act, Tensor& y));

// sums f64 [2C] = sum of g, sum of g xhat, where g is dy if act passes it, else 0; dgamma and dbeta
// f32 [C] += them where given (this rank's share). Without a residual act's argument is made again
// from x; with one, y decides, and dy becomes g, the gradient of the residual. `y` undefined: no
// residual.
WEFT_SCRATCH_OP(batch_norm_backward_sums,
                void(const Tensor& x, const Tensor& stats, const Tensor& gamma, const Tensor& beta,
                     Activation act, const Tensor& y, Tensor& dy, Tensor& sums, Tensor& dgamma,
                     Tensor& dbeta));

// dx (+)= gamma / sigma (g - stats[2] sums[0] - xhat stats[3] sums[1]), `sums` of all ranks. `act`
// as above, none where dy is g already. dx may be dy where it does not accumulate.
WEFT_OP(batch_norm_backward,
        void(const Tensor& x, const Tensor& stats, const Tensor& gamma, const Tensor& beta,
             Activation act, const Tensor& dy, const Tensor& sums, Tensor& dx, bool accumulate));

}  // namespace weft::ops
