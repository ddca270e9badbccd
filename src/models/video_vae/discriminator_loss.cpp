#include "models/video_vae/discriminator_loss.h"

#include <array>

#include "models/video_vae/options.h"
#include "ops/loss.h"
#include "ops/pointwise.h"

namespace weft {
namespace {

// The derivative of the logits' sum: ones.
void send_ones(const Var& logits) {
  const auto [d, accumulate] = grad_target(logits);
  ops::gan_loss_backward(logits->value, ops::GanLoss::linear, 1,
                         static_cast<float>(logits->value.numel()), d, accumulate);
}

}  // namespace

DiscriminatorLoss::DiscriminatorLoss(const VaeTrainDeck& deck, PatchGan& gan,
                                     ParameterTable& params)
    : deck_(deck), gan_(gan), params_(params), averages_(Tensor::persistent({2}, DType::f32)) {
  averages_.set(std::span<const float>(std::array<float, 2>{}));
}

// The losses of one side's logits, and their gradient there.
void DiscriminatorLoss::judge(const Var& logits, bool real, float weight, Sums& sums) const {
  using ops::GanLoss;
  const GanLoss kind = deck_.discriminator_loss == "hinge" ? GanLoss::hinge : GanLoss::logistic;
  const float sign = real ? -1 : 1;
  Tensor& mean = real ? sums.real : sums.fake;
  ops::gan_loss_forward(logits->value, kind, sign, 0.5f, sums.loss);
  ops::gan_loss_forward(logits->value, GanLoss::linear, 1, 1, mean);
  const auto [d, accumulate] = grad_target(logits);
  ops::gan_loss_backward(logits->value, kind, sign, 0.5f * weight, d, accumulate);
  if (deck_.lecam_weight == 0) return;
  const auto factor = static_cast<float>(deck_.lecam_weight);
  const Tensor other = real ? averages_.slice(1, 2) : averages_.slice(0, 1);
  Tensor slope = Tensor::empty({1}, DType::f32);
  ops::lecam(mean, other, -sign, factor, sums.lecam, slope);
  Tensor each = Tensor::empty(logits->value.shape(), logits->value.dtype());
  ops::gan_loss_backward(logits->value, GanLoss::linear, 1, 1, each, false);
  ops::scaled_add(each, factor * weight, slope, d, true);
}

// Adds the penalty and returns v, its derivative by the gradient g of the logits' sum at the
// frames. The penalty's derivative by a parameter is that of v g with v held fixed, and v g is the
// tangent of the logits' sum along v.
Tensor DiscriminatorLoss::penalise(const Tensor& real, float weight, Tensor& sum) const {
  const auto factor = static_cast<float>(deck_.gradient_penalty_weight);
  const Var x = make_var(real);
  {
    const FrozenScope frozen(params_, gan_.prefix());
    Tape tape;
    send_ones(gan_.forward({tape, params_}, x));
    tape.backward();
  }
  Tensor norms = Tensor::empty({real.dim(1)}, DType::f32);
  ops::gradient_penalty_forward(x->grad, factor, norms, sum);
  ops::gradient_penalty_backward(x->grad, norms, factor * weight, x->grad);
  return std::move(x->grad);
}

void DiscriminatorLoss::learn(const Tensor& real, const Tensor& fake, float weight,
                              Sums sums) const {
  Tape tape;
  const nn::Context c{tape, params_};
  // Fake frames first: their pass waits for new weights, which penalise() with its frozen
  // parameters does not.
  judge(gan_.forward(c, make_var(fake, false)), false, weight, sums);
  const Var x = make_var(real, false);
  if (deck_.gradient_penalty_weight > 0) {
    const Tensor along = penalise(real, weight, sums.penalty);
    const nn::Dual logits = gan_.forward(c, nn::Dual{x, make_var(along, false)});
    judge(logits.value, true, weight, sums);
    send_ones(logits.tangent);
  } else {
    judge(gan_.forward(c, x), true, weight, sums);
  }
  tape.backward();
}

}  // namespace weft
