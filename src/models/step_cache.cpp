#include "models/step_cache.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "core/error.h"
#include "models/flow_sampler.h"
#include "ops/layout.h"
#include "ops/loss.h"
#include "ops/pointwise.h"
#include "ops/random.h"

namespace weft {
namespace {

bool planning() { return Arena::current().is_planning(); }

// sum |a - b|; b undefined: sum |a|.
double distance(const Tensor& a, const Tensor& b) {
  const std::int64_t count = a.numel(), piece = std::min<std::int64_t>(count, 1 << 20);
  Tensor loss = Tensor::empty({1}, DType::f32), zeros;
  if (!b.defined()) {
    zeros = Tensor::empty({piece}, a.dtype());
    ops::fill_zero(zeros);
  }
  const Tensor x = a.view({count}), y = b.defined() ? b.view({count}) : Tensor();
  ops::fill_zero(loss);
  // In pieces, so that zeros are few.
  for (std::int64_t at = 0; at < count; at += piece) {
    const std::int64_t end = std::min(at + piece, count);
    ops::l1_forward(x.slice(at, end), b.defined() ? y.slice(at, end) : zeros.slice(0, end - at),
                    1.0f, loss);
  }
  return planning() ? 0.0 : static_cast<double>(loss.to_host().data<float>()[0]);
}

double polynomial(const std::vector<double>& coefficients, double x) {
  double y = 0;
  for (const double c : coefficients) y = y * x + c;
  return y;
}

// EasyCache runs the first steps whole: of 50, the published 10.
std::int64_t first_steps(std::int64_t steps) { return std::max<std::int64_t>(2, (steps + 4) / 5); }

// sum |a - b| / sum |c|.
double relative_change(const Tensor& a, const Tensor& b, const Tensor& c) {
  return distance(a, b) / distance(c, {});
}

}  // namespace

void check_cache(const SamplerDeck& sampler, const Denoiser& model) {
  WEFT_CHECK(sampler.cache != "teacache" || !model.cache_polynomial().empty(), Exit::usage,
             "take sampler.cache = \"easycache\", which any model can use",
             "sampler.cache = \"teacache\": there are no published coefficients for {}",
             model.name());
  WEFT_CHECK(sampler.cache == "none" || sampler.cfg_scale.size() == 1, Exit::usage,
             "set sampler.cache = \"none\", or one cfg_scale",
             "sampler.cache = \"{}\" with a guidance of {} experts", sampler.cache,
             sampler.cfg_scale.size());
}

void guided_velocity(const Tensor& out, float guidance, const Tensor& ones, Tensor& v) {
  ops::fill_zero(v);
  ops::guided_euler_step(out, guidance, ones, {}, v);
}

StepCache::StepCache(const SamplerDeck& sampler, Denoiser& model, const Tensor& z,
                     std::function<double(double)> agree)
    : model_(model),
      agree_(std::move(agree)),
      tea_(sampler.cache == "teacache"),
      threshold_(sampler.cache_threshold),
      guidance_(static_cast<float>(sampler.cfg_scale.front())),
      steps_(sampler.count()) {
  const std::vector<float> ones(static_cast<std::size_t>(z.dim(0)), 1.0f);
  ones_ = Tensor::from_host(std::span<const float>(ones), {z.dim(0)});
  if (tea_) return;
  for (Tensor* t : {&before_, &sample_, &captions_, &guided_})
    *t = Tensor::empty(z.shape(), DType::f32);
}

// Whether the step takes what is kept.
bool StepCache::skip(const DenoiserInput& in, bool whole) {
  const std::int64_t B = in.x.dim(0) / 2;
  double change = 0;
  if (tea_) {
    Tensor signal = model_.cache_signal(in);
    if (step_ > 0)
      change = polynomial(model_.cache_polynomial(), relative_change(signal, signal_, signal_));
    signal_ = std::move(signal);
    whole = whole || step_ == 0;
  } else {
    const Tensor z = in.x.slice(0, B);
    if (ratio_ >= 0) change = ratio_ * relative_change(z, before_, captions_);
    ops::convert(z, before_);
    whole = whole || step_ < first_steps(steps_) || ratio_ < 0;
  }
  if (whole || step_ == steps_ - 1 || planning()) {
    sum_ = 0;
    return false;
  }
  sum_ += agree_ ? agree_(change) : change;
  if (sum_ < threshold_) return true;
  sum_ = 0;
  return false;
}

void StepCache::run(DenoiserInput& in, Tensor& v) {
  const Tensor out = model_.velocity(in);
  guided_velocity(out, guidance_, ones_, v);
  if (tea_) return;
  // The velocity of the captions, of the first channels alone.
  const std::int64_t B = v.dim(0), C = v.dim(1);
  Tensor captions = Tensor::empty(v.shape(), DType::f32);
  for (std::int64_t b = 0; b < B; ++b) {
    const Shape frames = {out.dim(1), v.dim(2), v.dim(3), v.dim(4)};
    Tensor to = captions.slice(b, b + 1).view({C, v.dim(2), v.dim(3), v.dim(4)});
    ops::convert(out.slice(b, b + 1).view(frames).slice(0, C), to);
  }
  const Tensor z = in.x.slice(0, B);
  if (step_ > 0) {
    const double moved = distance(z, sample_);
    ratio_ = moved > 0 ? distance(captions, captions_) / moved : -1;
  }
  captions_ = std::move(captions);
  ops::convert(z, sample_);
  ops::convert(v, guided_);
}

void StepCache::velocity(DenoiserInput& in, bool whole, Tensor& v) {
  const bool reuse = skip(in, whole);
  skipped_ += reuse;
  if (tea_) {
    in.blocks = &blocks_;
    in.reuse_blocks = reuse;
  }
  if (tea_ || !reuse) {
    run(in, v);
  } else {
    // eps - x0 - x is kept, for both halves alike, so it is for the guided velocity. Here the
    // velocity is x0 - eps.
    ops::convert(guided_, v);
    const Tensor z = in.x.slice(0, v.dim(0));
    ops::scaled_add(z, -1.0f, {}, v, true);
    ops::add_inplace(sample_, v);
  }
  ++step_;
}

}  // namespace weft
