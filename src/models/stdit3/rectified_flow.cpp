#include "models/stdit3/rectified_flow.h"

#include <cmath>

#include "core/philox.h"
#include "models/stdit3/options.h"
#include "ops/random.h"

namespace weft {

float draw_timestep(const DiffusionDeck& d, const ClipSize& size, std::uint64_t seed,
                    std::uint64_t step, std::uint64_t sample) {
  const Philox random(seed, Purpose::timestep, step, sample);
  double u = 0;
  if (d.use_discrete_timesteps)
    u = random.below(0, static_cast<std::uint32_t>(d.num_timesteps)) /
        static_cast<double>(d.num_timesteps);
  else if (d.sample_method == "uniform")
    u = random.uniform(0);
  else
    // Logit-normal: the logistic function of a normal draw.
    u = 1.0 / (1.0 + std::exp(-(d.loc + d.scale * static_cast<double>(random.normal(0)))));
  double tau = u * 1000.0;
  if (d.use_timestep_transform)
    tau = timestep_transform(tau, size, d.transform_scale, d.fix_short_clips);
  return static_cast<float>(tau);
}

Tensor flow_loss(Tape& tape, Stdit3& model, const Tensor& x0, const Tensor& eps, Stdit3Input in,
                 const Tensor& weight) {
  in.x = Tensor::empty(x0.shape(), DType::f32);
  ops::flow_interpolate(x0, eps, in.timestep, in.x_mask, in.x);
  const Var out = model.forward(tape, in);
  Tensor loss = Tensor::empty({x0.dim(0)}, DType::f32);
  ops::velocity_loss_forward(out->value, x0, eps, in.x_mask, loss);
  if (tape.recording()) {
    out->grad = Tensor::empty(out->value.shape(), DType::f32);
    ops::velocity_loss_backward(out->value, x0, eps, in.x_mask, weight, out->grad);
  }
  return loss;
}

}  // namespace weft
