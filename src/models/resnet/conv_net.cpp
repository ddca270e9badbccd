#include "models/resnet/conv_net.h"

#include <cmath>
#include <utility>

#include "nn/conv.h"

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
    case ConvStart::zero:
      return {};
    case ConvStart::uniform:
      break;
  }
  return {Init::Kind::uniform, static_cast<float>(1 / std::sqrt(taps * in / groups))};
}

}  // namespace

Var convolve(nn::Context c, const Var& x, const ConvNorm& layer) {
  if (layer.offsets.weight != nullptr)
    return nn::deform_conv(c, x, nn::conv(c, x, layer.offsets, layer.geometry), layer.conv,
                           layer.geometry);
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

Parameter& ConvNet::add_bias(const std::string& name, std::int64_t out, double fan_in) {
  Parameter& bias =
      table.add(prefix + name + ".bias", {out}, start_of(ConvStart::uniform, 1, fan_in, 1, 1));
  bias.group = vector_group;
  return bias;
}

nn::BatchNorm ConvNet::add_norm(const std::string& name, std::int64_t channels) {
  const nn::BatchNorm norm =
      add_batch_norm(table, prefix + name, channels, beta, momentum, !rank_statistics);
  norm.weight->group = norm.bias->group = vector_group;
  return norm;
}

ConvNorm ConvNet::add_plain(const std::string& conv, const Feature& in, std::int64_t out,
                            const ops::Conv& geometry, bool bias) {
  ConvNorm layer;
  layer.geometry = geometry;
  layer.out = {out, in.rate * geometry.stride, in.grid};
  layer.conv = weights(conv, in, layer.out, geometry);
  if (bias)
    layer.conv.bias =
        &add_bias(conv, out, static_cast<double>(geometry.kh * geometry.kw * in.channels));
  return layer;
}

ConvNorm ConvNet::add(const std::string& conv, const std::string& norm, const Feature& in,
                      std::int64_t out, const ops::Conv& geometry) {
  ConvNorm layer = add_plain(conv, in, out, geometry);
  layer.norm = add_norm(norm, out);
  return layer;
}

void ConvNet::make_deformable(const std::string& conv, const Feature& in, ConvNorm& layer) {
  constexpr std::int64_t channels = 27;  // of each of 9 taps: two offsets, and a mask
  const ConvStart usual = std::exchange(start, ConvStart::zero);
  const std::string name = conv + ".conv_offset";
  layer.offsets = weights(name, in, {channels, layer.out.rate, layer.out.grid}, layer.geometry);
  layer.offsets.bias = &table.add(prefix + name + ".bias", {channels}, Init{});
  layer.offsets.bias->group = vector_group;
  start = usual;
}

nn::ConvWeights ConvNet::add_transposed(const std::string& name, const Feature& in,
                                        std::int64_t out) {
  nn::ConvWeights w;
  // Each weight is multiplied once a pixel of the input, and PyTorch counts `out` as its fan in.
  const Shape shape{in.channels, out, 2, 2};
  w.weight =
      &table.add(prefix + name + ".weight", shape,
                 start_of(start, 4, static_cast<double>(out), static_cast<double>(in.channels), 1));
  w.weight->bf16_only = true;
  w.weight->group = matrix_group;
  w.bias = &add_bias(name, out, static_cast<double>(4 * out));
  work_.push_back({shape.numel(), in, auxiliary});
  return w;
}

nn::ConvWeights ConvNet::add_classifier(const std::string& name, const Feature& in,
                                        std::int64_t out) {
  nn::ConvWeights w = weights(name, in, {out, in.rate, in.grid}, ops::Conv::same(1));
  w.bias = &add_bias(name, out, static_cast<double>(in.channels));
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
