#include "train/optimizer.h"

#include <cmath>

#include "ops/optimizer.h"

namespace weft {

double learning_rate(const TrainDeck& d, std::int64_t steps_done) {
  if (steps_done >= d.warmup_steps) return d.lr;
  return d.lr * static_cast<double>(steps_done + 1) / static_cast<double>(d.warmup_steps + 1);
}

void optimizer_step(const TrainDeck& d, std::int64_t steps_done, const Tensor& squares,
                    OptimizerState& state, int bucket) {
  const double t = static_cast<double>(steps_done + 1);
  ops::AdamW a;
  a.lr = static_cast<float>(learning_rate(d, steps_done));
  a.beta1 = static_cast<float>(d.adam_beta1);
  a.beta2 = static_cast<float>(d.adam_beta2);
  a.rest1 = static_cast<float>(1.0 - d.adam_beta1);
  a.rest2 = static_cast<float>(1.0 - d.adam_beta2);
  a.eps = static_cast<float>(d.adam_eps);
  a.weight_decay = static_cast<float>(d.weight_decay);
  a.correction1 = static_cast<float>(1.0 - std::pow(d.adam_beta1, t));
  a.correction2 = static_cast<float>(1.0 - std::pow(d.adam_beta2, t));
  a.grad_clip = static_cast<float>(d.grad_clip);
  a.ema_decay = static_cast<float>(d.ema_decay);
  Tensor master = state.master(bucket), m = state.exp_avg(bucket), v = state.exp_avg_sq(bucket);
  Tensor ema = state.ema(bucket), working = state.working(bucket);
  ops::adamw_step(a, squares, state.gradient(bucket), master, m, v, ema, working);
}

}  // namespace weft
