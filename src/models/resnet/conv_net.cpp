#include "models/resnet/conv_net.h"

#include <cmath>

namespace weft {
namespace {

Init start_of(ConvStart start, double taps, double in, double out, double groups) {
  const auto normal = [](double fan) {
    return Init{Init::Kind::normal, static_cast<float>(std::sqrt(2 / fan))};
  };
  switch (start) {
    case ConvStart::fan_out:
      return normal(taps * out);
    case ConvStart::fan_out_of_group:
      return normal(taps * out / groups);
    case ConvStart::fan_in:
      return normal(taps * in / groups);
    case ConvStart::uniform:
      break;
  }
  return {Init::Kind::uniform, static_cast<float>(1 / std::sqrt(taps * in / groups))};
}

}  // namespace

Var convolve(nn::Context c, const Var& x, const ConvNorm& layer) {
  return nn::conv(c, x, layer.conv, layer.geometry);
}

Var conv_norm(nn::Context c, const Var& x, const ConvNorm& layer, nn::BatchNormGroup& group,
              nn::Activation act, const Var& residual) {
  return nn::batch_norm(c, convolve(c, x, layer), layer.norm, group, act, residual);
}

std::vector<Var> conv_norms(nn::Context c, const std::vector<ConvNormCall>& calls,
                            nn::BatchNormGroup& group) {
  std::vector<nn::BatchNormCall> norms;
  for (const ConvNormCall& call : calls)
    norms.push_back({convolve(c, call.x, *call.layer), &call.layer->norm, call.act});
  return nn::batch_norms(c, norms, group);
}

nn::ConvWeights ConvNet::weights(const std::string& name, const Feature& in, const Feature& out,
                                 const ops::Conv& geometry) {
  const std::int64_t groups = geometry.groups;
  const Shape shape{out.channels, in.channels / groups, geometry.kh, geometry.kw};
  const Init init = start_of(start, geometry.kh * geometry.kw, static_cast<double>(in.channels),
                             static_cast<double>(out.channels), static_cast<double>(groups));
  nn::ConvWeights w;
  w.weight = &table.add(prefix + name + ".weight", shape, init);
  w.weight->bf16_only = true;
  w.weight->group = matrix_group;
  work_.push_back({shape.numel(), out, auxiliary});
  return w;
}

ConvNorm ConvNet::add(const std::string& conv, const std::string& norm, const Feature& in,
                      std::int64_t out, const ops::Conv& geometry) {
  ConvNorm layer;
  layer.geometry = geometry;
  layer.out = {out, in.rate * geometry.stride, in.grid};
  layer.conv = weights(conv, in, layer.out, geometry);
  layer.norm = add_batch_norm(table, prefix + norm, out, beta, momentum);
  layer.norm.weight->group = layer.norm.bias->group = vector_group;
  return layer;
}

nn::ConvWeights ConvNet::add_classifier(const std::string& name, const Feature& in,
                                        std::int64_t out) {
  nn::ConvWeights w = weights(name, in, {out, in.rate, in.grid}, ops::Conv::same(1));
  w.bias = &table.add(prefix + name + ".bias", {out},
                      start_of(ConvStart::uniform, 1, static_cast<double>(in.channels), 1, 1));
  w.bias->group = vector_group;
  return w;
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

}  // namespace weft
