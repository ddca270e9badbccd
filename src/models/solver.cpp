#include "models/solver.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "core/error.h"
#include "models/flow_sampler.h"
#include "ops/layout.h"
#include "ops/pointwise.h"
#include "ops/random.h"

namespace weft {

// ---- Times

namespace {

// A product rounded by itself: fused with the sum that follows, it gives other whole timesteps.
double times(double a, double b) {
  volatile double product = a * b;
  return product;
}

double shifted(double shift, double u) { return times(shift, u) / (1.0 + times(shift - 1.0, u)); }

}  // namespace

SamplerTimes sampler_times(const SamplerDeck& sampler, const DiffusionDeck& diffusion,
                           const ClipSize& size) {
  const auto K = sampler.count();
  const bool euler = sampler.solver == "euler";
  // As the original writes it: an f32 number in a table of f64.
  const double first = sampler.solver == "unipc" ? static_cast<double>(0.999f) : 1.0;
  SamplerTimes t;
  for (std::int64_t i = 0; i < K; ++i) {
    const auto at = static_cast<double>(i);
    if (sampler.shift > 0) {
      const double level = sampler.timesteps.empty() ? 1.0 - at / static_cast<double>(K)
                                                     : sampler.timesteps[i] / 1000;
      const double s =
          euler ? shifted(sampler.shift, level)
                : shifted(sampler.shift, times(at, -first / static_cast<double>(K)) + first);
      t.timestep.push_back(euler ? 1000.0 * s : std::trunc(1000.0 * s));
      t.sigma.push_back(static_cast<float>(s));
      continue;
    }
    double tau = (1.0 - at / static_cast<double>(K)) * 1000.0;
    if (diffusion.use_discrete_timesteps) tau = std::nearbyint(tau);
    if (sampler.use_timestep_transform) tau = timestep_transform(tau, size, 1.0);
    t.timestep.push_back(tau);
    // Rounding may put the first one above 1.
    t.sigma.push_back(std::min(static_cast<float>(tau / 1000.0), 1.0f));
  }
  t.sigma.push_back(0.0);
  for (std::size_t i = 0; !euler && i + 1 < t.sigma.size(); ++i)
    WEFT_CHECK(t.sigma[i] > t.sigma[i + 1], Exit::usage,
               "take fewer steps, or sampler.solver = \"euler\"",
               "sampler.steps = {}: steps {} and {} of \"{}\" have the same time", K, i, i + 1,
               sampler.solver);
  return t;
}

// ---- Coefficients

// alpha = 1 - sigma is the share of data, lambda = ln(alpha / sigma): -inf at noise, +inf at data.
namespace {

double lambda(double sigma) { return std::log((1.0 - sigma) / sigma); }

// From step i to i + 1: h, e^-h - 1, and the part that takes the data's prediction as constant.
struct Stride {
  double h, phi, alpha;
  StepSum base;
};
Stride stride(const std::vector<double>& sigma, std::int64_t i) {
  Stride s;
  s.h = lambda(sigma[i + 1]) - lambda(sigma[i]);
  s.phi = std::isinf(s.h) ? -1.0 : std::expm1(-s.h);
  s.alpha = 1.0 - sigma[i + 1];
  s.base.sample = sigma[i + 1] / sigma[i];
  s.base.data[0] = -s.alpha * s.phi;
  return s;
}

// 1 / r for r = (lambda_a - lambda_b) / h; 0 where lambda_a is that of pure noise.
double inverse_ratio(double sigma_a, double sigma_b, double h) {
  const double distance = lambda(sigma_a) - lambda(sigma_b);
  return std::isinf(distance) ? 0.0 : h / distance;
}

}  // namespace

StepSum dpm_step(const std::vector<double>& sigma, std::int64_t i) {
  const Stride s = stride(sigma, i);
  StepSum sum = s.base;
  const auto steps = std::ssize(sigma) - 1;
  if (i == 0 || i == steps - 1) return sum;
  const double slope = 0.5 * s.alpha * s.phi * inverse_ratio(sigma[i], sigma[i - 1], s.h);
  sum.data[0] -= slope;
  sum.data[1] += slope;
  return sum;
}

StepSum unipc_predictor(const std::vector<double>& sigma, std::int64_t i) {
  const Stride s = stride(sigma, i);
  StepSum sum = s.base;
  const auto steps = std::ssize(sigma) - 1;
  if (std::min({std::int64_t{2}, i + 1, steps - i}) == 1) return sum;
  const double slope = 0.5 * s.alpha * s.phi * inverse_ratio(sigma[i - 1], sigma[i], s.h);
  sum.data[1] -= slope;
  sum.data[0] += slope;
  return sum;
}

StepSum unipc_corrector(const std::vector<double>& sigma, std::int64_t i) {
  const Stride s = stride(sigma, i - 1);
  const auto steps = std::ssize(sigma) - 1;
  StepSum sum{s.base.sample, {0, s.base.data[0], 0}};
  // Weights of m_i - m_{i-1} and of (m_{i-2} - m_{i-1}) / r.
  double newer = 0.5, older = 0;
  if (std::min({std::int64_t{2}, i, steps - i + 1}) == 2) {
    const double inverse = inverse_ratio(sigma[i - 2], sigma[i - 1], s.h);
    const double k1 = -s.phi / s.h - 1.0, k2 = -k1 / s.h - 0.5;
    const double b1 = k1 / s.phi, b2 = 2.0 * k2 / s.phi;
    // (b1 - b2) / (1 - r), by 1 / r, which may be 0.
    const double rho = inverse == 0 ? 0.0 : (b1 - b2) * inverse / (inverse - 1.0);
    older = rho * inverse;
    newer = b1 - rho;
  }
  const double weight = -s.alpha * s.phi;
  sum.data[0] += weight * newer;
  sum.data[1] -= weight * (newer + older);
  sum.data[2] += weight * older;
  return sum;
}

// ---- Steps

Solver::Solver(const std::string& name, std::vector<SamplerTimes> times, const Tensor& z)
    : kind_(name == "euler"   ? Kind::euler
            : name == "dpm++" ? Kind::dpm
                              : Kind::unipc),
      times_(std::move(times)),
      next_(Tensor::empty(z.shape(), DType::f32)) {
  WEFT_ASSERT(std::ssize(times_) == z.dim(0));
  if (kind_ == Kind::unipc) corrected_ = Tensor::empty(z.shape(), DType::f32);
  const std::size_t kept = kind_ == Kind::euler ? 0 : kind_ == Kind::dpm ? 2 : 3;
  for (std::size_t k = 0; k < kept; ++k) data_[k] = Tensor::empty(z.shape(), DType::f32);
  const std::vector<float> whole(times_.size(), 1000.0f);
  whole_ = Tensor::from_host(std::span<const float>(whole), {z.dim(0)});
}

// Sample b of next_ = the sum. Terms whose coefficient is 0 are left out: before the first steps
// there is nothing in memory but what was there.
void Solver::sum(const StepSum& of, std::int64_t b, const Tensor& sample) {
  Tensor to = next_.slice(b, b + 1);
  ops::scaled_add(sample.slice(b, b + 1), static_cast<float>(of.sample), {}, to, false);
  for (std::size_t k = 0; k < of.data.size(); ++k)
    if (of.data[k] != 0)
      ops::scaled_add(data_[k].slice(b, b + 1), static_cast<float>(of.data[k]), {}, to, true);
}

void Solver::step(std::int64_t i, const Tensor& velocity, const Tensor& active, Tensor& z) {
  const auto samples = std::ssize(times_);
  if (kind_ == Kind::euler) {
    for (std::int64_t b = 0; b < samples; ++b) {
      const std::vector<double>& t = times_[b].timestep;
      const double until = i + 1 < std::ssize(t) ? t[i + 1] : 0.0;
      Tensor to = next_.slice(b, b + 1);
      ops::convert(z.slice(b, b + 1), to);
      ops::scaled_add(velocity.slice(b, b + 1), static_cast<float>((t[i] - until) / 1000.0), {}, to,
                      true);
    }
  } else {
    // 1. The data that this step predicts: x0 = z + sigma (x0 - eps).
    std::rotate(data_.begin(), data_.begin() + (kind_ == Kind::dpm ? 1 : 2),
                data_.begin() + (kind_ == Kind::dpm ? 2 : 3));
    for (std::int64_t b = 0; b < samples; ++b) {
      Tensor x0 = data_[0].slice(b, b + 1);
      ops::convert(z.slice(b, b + 1), x0);
      ops::scaled_add(velocity.slice(b, b + 1), static_cast<float>(times_[b].sigma[i]), {}, x0,
                      true);
    }
    // 2. With it the sample where we are.
    if (kind_ == Kind::unipc && i == 0) ops::convert(z, corrected_);
    if (kind_ == Kind::unipc && i > 0) {
      for (std::int64_t b = 0; b < samples; ++b)
        sum(unipc_corrector(times_[b].sigma, i), b, corrected_);
      std::swap(corrected_, next_);
    }
    // 3. The next one.
    for (std::int64_t b = 0; b < samples; ++b)
      sum(kind_ == Kind::dpm ? dpm_step(times_[b].sigma, i) : unipc_predictor(times_[b].sigma, i),
          b, kind_ == Kind::dpm ? z : corrected_);
  }
  if (active.defined())
    ops::flow_interpolate(z, next_, whole_, active, z);
  else
    ops::convert(next_, z);
}

}  // namespace weft
