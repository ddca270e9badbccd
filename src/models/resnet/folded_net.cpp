#include "models/resnet/folded_net.h"

#include <algorithm>
#include <cmath>
#include <span>
#include <utility>

#include "core/error.h"
#include "ops/norm.h"
#include "ops/pointwise.h"

namespace weft {
namespace {

constexpr float norm_eps = 1e-5f;
MultiplyAddCount* active_count = nullptr;

const Tensor& stored(const Parameter& p) { return p.value.defined() ? p.value : p.working; }

std::vector<float> values_of(const Parameter& p) {
  const Tensor host = stored(p).to_host();
  std::vector<float> values(static_cast<std::size_t>(host.numel()));
  if (host.dtype() == DType::f32)
    std::ranges::copy(host.span<float>(), values.begin());
  else
    for (std::size_t i = 0; i < values.size(); ++i)
      values[i] = static_cast<float>(host.span<bf16>()[i]);
  return values;
}

// Row o of p, seen as [rows, rest], times factors[o].
void scale_rows(Parameter& p, std::span<const double> factors) {
  std::vector<float> values = values_of(p);
  const std::size_t rest = values.size() / factors.size();
#pragma omp parallel for schedule(static)
  for (std::size_t o = 0; o < factors.size(); ++o)
    for (std::size_t i = 0; i < rest; ++i)
      values[o * rest + i] = static_cast<float>(values[o * rest + i] * factors[o]);
  p.set(0, values);
}

// u . (W v).
double spectral_norm(const Parameter& w, const Parameter& u, const Parameter& v) {
  const std::vector<float> W = values_of(w), us = values_of(u), vs = values_of(v);
  std::vector<double> rows(us.size());
#pragma omp parallel for schedule(static)
  for (std::size_t o = 0; o < us.size(); ++o) {
    double sum = 0;
    for (std::size_t i = 0; i < vs.size(); ++i)
      sum += static_cast<double>(W[o * vs.size() + i]) * vs[i];
    rows[o] = sum * us[o];
  }
  double sum = 0;
  for (const double r : rows) sum += r;
  return sum;
}

void check(bool sane, const Parameter& p, double value, const char* what) {
  WEFT_CHECK(sane, Exit::data, "the file is damaged, or of another network",
             "weights: {} of \"{}\" is {}", what, p.name, value);
}

// Tensors that lie one behind the other, as one of that shape.
Tensor joined_view(const std::vector<Parameter*>& parts, bool low, const Shape& shape) {
  const Tensor& first = low ? parts[0]->working : parts[0]->value;
  auto* at = static_cast<std::byte*>(first.raw());
  for (const Parameter* p : parts) {
    const Tensor& t = low ? p->working : p->value;
    WEFT_ASSERT(t.raw() == at);
    at += t.bytes();
  }
  return Tensor::borrow(first.raw(), shape, first.dtype(), first.device());
}

}  // namespace

MultiplyAddCount::MultiplyAddCount() {
  WEFT_ASSERT(active_count == nullptr);
  active_count = this;
}
MultiplyAddCount::~MultiplyAddCount() { active_count = nullptr; }

bool counts_batches(const std::string& name) { return name.ends_with(".num_batches_tracked"); }

Tensor convolve(const FoldedConv& conv, const Tensor& x, float slope, const Tensor& residual) {
  WEFT_ASSERT(conv.weight.defined() && x.dim(-1) == conv.in);
  Tensor y = Tensor::empty(conv.geometry.output(x.shape(), conv.out), x.dtype());
  if (active_count != nullptr)
    active_count->total_ += static_cast<double>(y.numel()) *
                            static_cast<double>(conv.weight.numel()) /
                            static_cast<double>(conv.out);
  ops::conv_forward(x, conv.weight, conv.bias, residual, conv.geometry, y);
  if (slope != 1) ops::leaky_relu_forward(y, slope, y);
  return y;
}

void normalise(const FoldedNorm& norm, const Tensor& x, bool relu, Tensor& y) {
  WEFT_ASSERT(norm.statistics.defined());
  ops::batch_norm_apply(x, norm.statistics, norm.gamma->value, norm.beta->value, {}, {}, {}, {},
                        relu ? ops::Activation::relu : ops::Activation::none, y);
}

Parameter* FoldedNet::vector(const std::string& name, std::int64_t n, Init init) {
  return &table_.add(prefix + name, {n}, init);
}

Parameter* FoldedNet::weight(const std::string& name, const FoldedConv& conv, std::int64_t out) {
  const ops::Conv& g = conv.geometry;
  WEFT_ASSERT((axes >= 2 || g.kt * g.kh == 1) && (axes >= 1 || g.kw == 1));
  const std::int64_t ins = conv.in / g.groups, kernel[] = {g.kt, g.kh, g.kw};
  std::vector<std::int64_t> shape = {out, axes == 2 ? ins * g.kt : ins};
  shape.insert(shape.end(), kernel + 3 - axes, kernel + 3);
  const double fan_in = static_cast<double>(ins * g.kt * g.kh * g.kw);
  Parameter& p = table_.add(prefix + name, Shape(shape),
                            {Init::Kind::uniform, static_cast<float>(1 / std::sqrt(fan_in))});
  p.bf16_only = true;
  return &p;
}

FoldedNet::Norm FoldedNet::norm(const std::string& name, std::int64_t channels) {
  const Init zero{}, one{Init::Kind::constant, 1};
  return {vector(name + ".weight", channels, one), vector(name + ".bias", channels, zero),
          vector(name + ".running_mean", channels, zero),
          vector(name + ".running_var", channels, one)};
}

FoldedNet::Layer& FoldedNet::layer(std::int64_t in, std::int64_t out, const ops::Conv& geometry) {
  Layer& l = layers_.emplace_back();
  l.conv = std::make_unique<FoldedConv>();
  l.conv->geometry = geometry;
  l.conv->in = in;
  l.conv->out = out;
  return l;
}

const FoldedConv* FoldedNet::add(const std::string& conv, const std::string& norm_name,
                                 std::int64_t in, std::int64_t out, const ops::Conv& geometry,
                                 bool bias) {
  Layer& l = layer(in, out, geometry);
  l.weights = {weight(conv + ".weight", *l.conv, out)};
  if (bias) l.biases = {vector(conv + ".bias", out, l.weights[0]->init)};
  if (!norm_name.empty()) l.norm = std::make_unique<Norm>(norm(norm_name, out));
  return l.conv.get();
}

const FoldedConv* FoldedNet::add_joined(const std::vector<std::string>& convs, std::int64_t in,
                                        std::int64_t out, const ops::Conv& geometry, bool bias) {
  Layer& l = layer(in, out * std::ssize(convs), geometry);
  for (const std::string& name : convs) l.weights.push_back(weight(name + ".weight", *l.conv, out));
  if (bias)
    for (const std::string& name : convs)
      l.biases.push_back(vector(name + ".bias", out, l.weights[0]->init));
  return l.conv.get();
}

const FoldedConv* FoldedNet::add_spectral(const std::string& conv, std::int64_t in,
                                          std::int64_t out, const ops::Conv& geometry, bool bias) {
  Layer& l = layer(in, out, geometry);
  Parameter* w = weight(conv + ".weight_orig", *l.conv, out);
  l.weights = {w};
  // Weights that are drawn so have a norm of about 1.
  l.u = vector(conv + ".weight_u", out,
               {Init::Kind::constant, std::sqrt(3.0f / static_cast<float>(out))});
  l.v = vector(conv + ".weight_v", w->shape.numel() / out, {Init::Kind::constant, 1});
  if (bias) l.biases = {vector(conv + ".bias", out, w->init)};
  return l.conv.get();
}

const FoldedNorm* FoldedNet::add_norm(const std::string& name, std::int64_t channels) {
  fronts_.push_back({std::make_unique<FoldedNorm>(), norm(name, channels)});
  Front& f = fronts_.back();
  f.norm->gamma = f.of.gamma;
  f.norm->beta = f.of.beta;
  return f.norm.get();
}

void FoldedNet::fold(Layer& l) const {
  FoldedConv& c = *l.conv;
  const ops::Conv& g = c.geometry;
  WEFT_ASSERT(!c.weight.defined());
  if (l.biases.size() == 1) c.bias = l.biases[0]->value;
  if (l.biases.size() > 1) {
    std::vector<float> all;
    for (const Parameter* p : l.biases)
      for (const float v : values_of(*p)) all.push_back(v);
    c.bias = Tensor::persistent({c.out}, DType::f32);
    c.bias.set(std::span<const float>(all));
  }
  if (l.norm) {
    const std::vector<float> gamma = values_of(*l.norm->gamma), beta = values_of(*l.norm->beta),
                             mean = values_of(*l.norm->mean),
                             variance = values_of(*l.norm->variance);
    const std::vector<float> before =
        l.biases.empty() ? std::vector<float>(gamma.size()) : values_of(*l.biases[0]);
    std::vector<double> factors;
    std::vector<float> bias;
    for (std::size_t i = 0; i < gamma.size(); ++i) {
      check(variance[i] >= 0 && std::isfinite(variance[i]), *l.norm->variance, variance[i],
            "a value");
      factors.push_back(gamma[i] / std::sqrt(static_cast<double>(variance[i]) + norm_eps));
      bias.push_back(static_cast<float>(beta[i] + (static_cast<double>(before[i]) - mean[i]) *
                                                      factors.back()));
    }
    scale_rows(*l.weights[0], factors);
    // The norm's shift, which is not read again, takes the folded bias.
    l.norm->beta->set(0, bias);
    c.bias = l.norm->beta->value;
  }
  if (l.u != nullptr) {
    const double sigma = spectral_norm(*l.weights[0], *l.u, *l.v);
    check(sigma != 0 && std::isfinite(sigma), *l.weights[0], sigma, "the spectral norm");
    scale_rows(*l.weights[0], std::vector<double>(static_cast<std::size_t>(c.out), 1 / sigma));
  }
  const Shape shape = g.kt > 1 ? Shape{c.out, c.in / g.groups, g.kt, g.kh, g.kw}
                               : Shape{c.out, c.in / g.groups, g.kh, g.kw};
  c.weight = l.weights.size() > 1 ? joined_view(l.weights, !l.weights[0]->value.defined(), shape)
                                  : stored(*l.weights[0]).view(shape);
}

void FoldedNet::fold() {
  for (Layer& l : layers_) fold(l);
  for (Front& f : fronts_) {
    for (const float v : values_of(*f.of.variance))
      check(v >= 0 && std::isfinite(v), *f.of.variance, v, "a value");
    f.norm->statistics = Tensor::persistent({4, f.of.mean->shape[0]}, DType::f32);
    ops::batch_norm_running_statistics(f.of.mean->value, f.of.variance->value, norm_eps,
                                       f.norm->statistics);
  }
}

}  // namespace weft
