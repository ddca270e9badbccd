#include "nn/text_loss.h"

#include "core/error.h"

namespace weft::nn {

Tensor text_loss(Context c, const Var& probability, const Var& threshold, const Tensor& flags,
                 const Tensor& thresholds, float weight) {
  const Tensor &p = probability->value, &t = threshold->value;
  WEFT_ASSERT(p.shape() == t.shape() && p.dtype() == t.dtype());
  WEFT_ASSERT(flags.numel() == p.numel() && thresholds.numel() == p.numel());
  Tensor stats = Tensor::empty({ops::text_stats}, DType::f64);
  ops::text_loss_forward(p, t, flags, thresholds, stats);
  if (c.tape.recording())
    c.tape.record([probability, threshold, flags, thresholds, stats, weight] {
      Tensor dp = Tensor::empty(probability->value.shape(), probability->value.dtype()),
             dt = Tensor::empty(threshold->value.shape(), threshold->value.dtype());
      ops::text_loss_backward(probability->value, threshold->value, flags, thresholds, stats,
                              weight, dp, dt);
      if (probability->needs_grad) give_grad(probability, std::move(dp));
      if (threshold->needs_grad) give_grad(threshold, std::move(dt));
    });
  return stats;
}

}  // namespace weft::nn
