#include "models/resnet/conv_net.h"

#include <algorithm>
#include <cmath>

#include "core/error.h"
#include "nn/conv.h"
#include "ops/norm.h"
#include "ops/pointwise.h"

namespace weft {

// ---- Registering.

namespace {

Init start_of(ConvStart start, double taps, double in, double out, double groups) {
  const auto normal = [](double fan) { return Init::normal(std::sqrt(2 / fan)); };
  switch (start) {
    case ConvStart::fan_out:
      return normal(taps * out);
    case ConvStart::fan_out_of_group:
      return normal(taps * out / groups);
    case ConvStart::fan_in:
      return normal(taps * in / groups);
    case ConvStart::zero:
      return {};
    case ConvStart::uniform:
      break;
  }
  return Init::uniform(1 / std::sqrt(taps * in / groups));
}

}  // namespace

ConvLayer& ConvNet::layer(const Feature& in, std::int64_t out, const ops::Conv& geometry) {
  ConvLayer& l = layers_.emplace_back();
  l.geometry = geometry;
  l.in = in;
  l.out = {out, in.rate * geometry.stride, in.grid};
  return l;
}

Parameter* ConvNet::weight(const std::string& name, const ConvLayer& l, std::int64_t out) {
  const ops::Conv& g = l.geometry;
  WEFT_ASSERT((axes >= 2 || g.kt * g.kh == 1) && (axes >= 1 || g.kw == 1));
  const std::int64_t ins = l.in.channels / g.groups, kernel[] = {g.kt, g.kh, g.kw};
  std::vector<std::int64_t> shape = {out, axes == 2 ? ins * g.kt : ins};
  shape.insert(shape.end(), kernel + 3 - axes, kernel + 3);
  Parameter& p = table.add(prefix + name, Shape(shape),
                           start_of(start, g.kt * g.kh * g.kw, static_cast<double>(l.in.channels),
                                    static_cast<double>(out), g.groups));
  p.bf16_only = true;
  p.group = matrix_group;
  work_.push_back({p.shape.numel(), {out, l.out.rate, l.out.grid}, auxiliary});
  return &p;
}

Parameter* ConvNet::vector(const std::string& name, std::int64_t n, const Init& init) {
  Parameter& p = table.add(prefix + name, {n}, init);
  p.group = vector_group;
  return &p;
}

nn::ConvWeights ConvNet::conv(const std::string& name, const ConvLayer& l, std::int64_t out,
                              bool bias) {
  nn::ConvWeights w{weight(name + ".weight", l, out)};
  const ops::Conv& g = l.geometry;
  if (bias)
    w.bias = vector(name + ".bias", out,
                    start_of(start == ConvStart::zero ? start : ConvStart::uniform,
                             g.kt * g.kh * g.kw, static_cast<double>(l.in.channels), 1, g.groups));
  return w;
}

nn::BatchNorm ConvNet::norm(const std::string& name, std::int64_t channels) {
  const nn::BatchNorm norm =
      add_batch_norm(table, prefix + name, channels, beta, momentum, shared_statistics);
  norm.weight->group = norm.bias->group = vector_group;
  return norm;
}

const ConvLayer* ConvNet::add(const std::string& name, const std::string& norm_name,
                              const Feature& in, std::int64_t out, const ops::Conv& geometry,
                              bool bias) {
  ConvLayer& l = layer(in, out, geometry);
  l.conv = conv(name, l, out, bias);
  if (!norm_name.empty()) l.norm = norm(norm_name, out);
  return &l;
}

const ConvLayer* ConvNet::add_deformable(const std::string& name, const std::string& norm_name,
                                         const Feature& in, std::int64_t out,
                                         const ops::Conv& geometry) {
  constexpr std::int64_t channels = 27;  // of each of 9 taps: two offsets, and a mask
  add(name, norm_name, in, out, geometry);
  const ConvStart usual = std::exchange(start, ConvStart::zero);
  layers_.back().offsets = conv(name + ".conv_offset", layers_.back(), channels, true);
  start = usual;
  return &layers_.back();
}

const ConvLayer* ConvNet::add_joined(const std::vector<std::string>& convs, const Feature& in,
                                     std::int64_t out, const ops::Conv& geometry, bool bias) {
  ConvLayer& l = layer(in, out * std::ssize(convs), geometry);
  for (const std::string& name : convs) l.more.push_back({weight(name + ".weight", l, out)});
  for (std::size_t i = 0; bias && i < convs.size(); ++i)
    l.more[i].bias = vector(convs[i] + ".bias", out, l.more[i].weight->init);
  l.conv = l.more.front();
  l.more.erase(l.more.begin());
  return &l;
}

const ConvLayer* ConvNet::add_spectral(const std::string& name, const Feature& in, std::int64_t out,
                                       const ops::Conv& geometry, bool bias) {
  ConvLayer& l = layer(in, out, geometry);
  Parameter* w = weight(name + ".weight_orig", l, out);
  l.conv.weight = w;
  // Weights that are drawn so have a norm of about 1.
  l.u = vector(name + ".weight_u", out, Init::constant(std::sqrt(3.0f / static_cast<float>(out))));
  l.v = vector(name + ".weight_v", w->shape.numel() / out, Init::constant(1));
  if (bias) l.conv.bias = vector(name + ".bias", out, w->init);
  return &l;
}

nn::ConvWeights ConvNet::add_transposed(const std::string& name, const Feature& in,
                                        std::int64_t out) {
  // Each weight is multiplied once a pixel of the input, and PyTorch counts `out` as its fan in.
  const Shape shape{in.channels, out, 2, 2};
  Parameter& w =
      table.add(prefix + name + ".weight", shape,
                start_of(start, 4, static_cast<double>(out), static_cast<double>(in.channels), 1));
  w.bf16_only = true;
  w.group = matrix_group;
  work_.push_back({shape.numel(), in, auxiliary});
  return {&w, vector(name + ".bias", out,
                     start_of(ConvStart::uniform, 4, static_cast<double>(out), 1, 1))};
}

const NormLayer* ConvNet::add_norm(const std::string& name, std::int64_t channels) {
  return &norms_.emplace_back(NormLayer{norm(name, channels), {}});
}

double ConvNet::multiply_adds(std::int64_t height, std::int64_t width, bool with_auxiliary) const {
  double sum = 0;
  for (const Work& w : work_) {
    if (w.auxiliary && !with_auxiliary) continue;
    const auto side = [&](std::int64_t n) {
      return static_cast<double>(w.out.grid > 0 ? w.out.grid : (n + w.out.rate - 1) / w.out.rate);
    };
    sum += static_cast<double>(w.weights) * side(height) * side(width);
  }
  return sum;
}

// ---- Folding.

const Tensor& stored(const Parameter& p) { return p.value.defined() ? p.value : p.working; }

std::vector<float> values_of(const Parameter& p) {
  const Tensor host = stored(p).to_host();
  std::vector<float> values(host.numel());
  if (host.dtype() == DType::f32)
    std::ranges::copy(host.span<float>(), values.begin());
  else
    std::ranges::transform(host.span<bf16>(), values.begin(),
                           [](bf16 v) { return static_cast<float>(v); });
  return values;
}

void scale_rows(Parameter& p, std::span<const double> factors) {
  std::vector<float> values = values_of(p);
  const std::size_t rest = values.size() / factors.size();
#pragma omp parallel for schedule(static)
  for (std::size_t o = 0; o < factors.size(); ++o)
    for (std::size_t i = 0; i < rest; ++i)
      values[o * rest + i] = static_cast<float>(values[o * rest + i] * factors[o]);
  p.set(0, values);
}

namespace {

constexpr float norm_eps = 1e-5f;

void check(bool sane, const Parameter& p, double value, const char* what) {
  WEFT_CHECK(sane, Exit::data, "the file is damaged, or of another network",
             "weights: {} of \"{}\" is {}", what, p.name, value);
}

void check_variances(const nn::BatchNorm& norm) {
  for (const float v : values_of(*norm.running_var))
    check(v >= 0 && std::isfinite(v), *norm.running_var, v, "a value");
}

// gamma (conv + bias - mean) / sqrt(variance + eps) + beta: the weights' rows take the factors, and
// the norm's shift, which is not read again, the bias that this makes.
Tensor fold_norm(const nn::BatchNorm& norm, const nn::ConvWeights& conv) {
  check_variances(norm);
  const std::vector<float> gamma = values_of(*norm.weight), beta = values_of(*norm.bias),
                           mean = values_of(*norm.running_mean),
                           variance = values_of(*norm.running_var);
  const std::vector<float> before =
      conv.bias != nullptr ? values_of(*conv.bias) : std::vector<float>(gamma.size());
  std::vector<double> factors;
  std::vector<float> bias;
  for (std::size_t i = 0; i < gamma.size(); ++i) {
    factors.push_back(gamma[i] / std::sqrt(static_cast<double>(variance[i]) + norm_eps));
    bias.push_back(
        static_cast<float>(beta[i] + (static_cast<double>(before[i]) - mean[i]) * factors.back()));
  }
  scale_rows(*conv.weight, factors);
  norm.bias->set(0, bias);
  return norm.bias->value;
}

// Divides the weights by u . (W v).
void fold_spectral_norm(Parameter& w, const Parameter& u, const Parameter& v) {
  const std::vector<float> W = values_of(w), us = values_of(u), vs = values_of(v);
  std::vector<double> rows(us.size());
#pragma omp parallel for schedule(static)
  for (std::size_t o = 0; o < us.size(); ++o) {
    double sum = 0;
    for (std::size_t i = 0; i < vs.size(); ++i)
      sum += static_cast<double>(W[o * vs.size() + i]) * vs[i];
    rows[o] = sum * us[o];
  }
  double sigma = 0;
  for (const double r : rows) sigma += r;
  check(sigma != 0 && std::isfinite(sigma), w, sigma, "the spectral norm");
  scale_rows(w, std::vector<double>(us.size(), 1 / sigma));
}

// The weights of all its convolutions as one tensor: they lie one behind the other.
Tensor joined_weights(const ConvLayer& l, const Shape& shape) {
  const Tensor& first = stored(*l.conv.weight);
  auto* end = static_cast<std::byte*>(first.raw()) + first.bytes();
  for (const nn::ConvWeights& w : l.more) {
    WEFT_ASSERT(stored(*w.weight).raw() == end);
    end += stored(*w.weight).bytes();
  }
  return Tensor::borrow(first.raw(), shape, first.dtype(), first.device());
}

Tensor joined_biases(const ConvLayer& l) {
  std::vector<float> all = values_of(*l.conv.bias);
  for (const nn::ConvWeights& w : l.more)
    for (const float v : values_of(*w.bias)) all.push_back(v);
  Tensor bias = Tensor::persistent({l.out.channels}, DType::f32);
  bias.set(std::span<const float>(all));
  return bias;
}

}  // namespace

void ConvNet::fold() {
  for (ConvLayer& l : layers_) {
    WEFT_ASSERT(!l.folded() && l.offsets.weight == nullptr);
    if (l.norm.weight != nullptr)
      l.bias = fold_norm(l.norm, l.conv);
    else if (l.conv.bias != nullptr)
      l.bias = l.more.empty() ? l.conv.bias->value : joined_biases(l);
    if (l.u != nullptr) fold_spectral_norm(*l.conv.weight, *l.u, *l.v);
    const ops::Conv& g = l.geometry;
    const std::int64_t ins = l.in.channels / g.groups;
    const Shape shape = g.kt > 1 ? Shape{l.out.channels, ins, g.kt, g.kh, g.kw}
                                 : Shape{l.out.channels, ins, g.kh, g.kw};
    l.weight = l.more.empty() ? stored(*l.conv.weight).view(shape) : joined_weights(l, shape);
  }
  for (NormLayer& n : norms_) {
    check_variances(n.norm);
    n.statistics = Tensor::persistent({4, n.norm.weight->shape[0]}, DType::f32);
    ops::batch_norm_running_statistics(n.norm.running_mean->value, n.norm.running_var->value,
                                       norm_eps, n.statistics);
  }
}

// ---- Folded layers on tensors.

namespace {

OperationCount* active_count = nullptr;

}  // namespace

OperationCount::OperationCount() {
  WEFT_ASSERT(active_count == nullptr);
  active_count = this;
}
OperationCount::~OperationCount() { active_count = nullptr; }

Tensor convolve(const ConvLayer& l, const Tensor& x, float slope, const Tensor& residual) {
  WEFT_ASSERT(l.folded() && x.dim(-1) == l.in.channels);
  Tensor y = Tensor::empty(l.geometry.output(x.shape(), l.out.channels), x.dtype());
  if (active_count != nullptr)
    active_count->total_ += 2 * static_cast<double>(y.numel()) *
                            static_cast<double>(l.weight.numel()) /
                            static_cast<double>(l.out.channels);
  ops::conv_forward(x, l.weight, l.bias, residual, l.geometry, y);
  if (slope != 1) ops::leaky_relu_forward(y, slope, y);
  return y;
}

void normalise(const NormLayer& n, const Tensor& x, bool relu, Tensor& y) {
  WEFT_ASSERT(n.statistics.defined());
  ops::batch_norm_apply(x, n.statistics, n.norm.weight->value, n.norm.bias->value, {}, {}, {}, {},
                        relu ? ops::Activation::relu : ops::Activation::none, y);
}

// ---- Layers on a tape.

namespace {

Var run_folded(const ConvNormCall& call) {
  WEFT_ASSERT(call.act == nn::Activation::relu || call.act == nn::Activation::none);
  const float slope = call.act == nn::Activation::relu ? 0 : 1;
  return make_var(
      convolve(*call.layer, call.x->value, slope, call.residual ? call.residual->value : Tensor()),
      false);
}

}  // namespace

Var convolve(nn::Context c, const Var& x, const ConvLayer& l) {
  WEFT_ASSERT(!l.folded());
  if (l.offsets.weight != nullptr)
    return nn::deform_conv(c, x, nn::conv(c, x, l.offsets, l.geometry), l.conv, l.geometry);
  return nn::conv(c, x, l.conv, l.geometry);
}

Var conv_norm(nn::Context c, const Var& x, const ConvLayer& l, nn::BatchNormGroup& group,
              nn::Activation act, const Var& residual) {
  if (l.folded()) return run_folded({x, &l, act, residual});
  return nn::batch_norm(c, convolve(c, x, l), l.norm, group, act, residual);
}

std::vector<Var> conv_norms(nn::Context c, std::vector<ConvNormCall> calls,
                            nn::BatchNormGroup& group) {
  std::vector<Var> folded;
  std::vector<nn::BatchNormCall> norms;
  for (ConvNormCall& call : calls) {
    if (call.layer->folded())
      folded.push_back(run_folded(call));
    else
      norms.push_back(
          {convolve(c, call.x, *call.layer), &call.layer->norm, call.act, call.residual});
    call.x.reset();  // what nothing else holds is freed before the next
  }
  WEFT_ASSERT(folded.empty() || norms.empty());
  return folded.empty() ? nn::batch_norms(c, norms, group) : folded;
}

Var conv_norm_add(nn::Context c, ConvNormCall a, ConvNormCall b, nn::BatchNormGroup& group) {
  if (a.layer->folded()) {
    b.act = nn::Activation::none;
    a.residual = run_folded(b);
    b.x.reset();
    return run_folded(a);
  }
  const Var y = convolve(c, std::exchange(a.x, nullptr), *a.layer),
            z = convolve(c, std::exchange(b.x, nullptr), *b.layer);
  return nn::batch_norm_add(c, {y, &a.layer->norm}, {z, &b.layer->norm}, group,
                            nn::Activation::relu);
}

}  // namespace weft
