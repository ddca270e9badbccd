#include "nn/conv_layers.h"

#include <cmath>
#include <vector>

namespace weft {
namespace {

Init within(std::int64_t fan_in) {
  return {Init::Kind::uniform, static_cast<float>(1.0 / std::sqrt(static_cast<double>(fan_in)))};
}

}  // namespace

nn::ConvWeights add_conv(ParameterTable& table, const std::string& name, std::int64_t out,
                         std::int64_t in, std::initializer_list<std::int64_t> kernel, bool bias,
                         bool trainable) {
  std::vector<std::int64_t> dims{out, in};
  dims.insert(dims.end(), kernel);
  const Shape shape{std::span<const std::int64_t>(dims)};
  const Init init = within(shape.numel() / out);
  nn::ConvWeights w;
  w.weight = &table.add(name + ".weight", shape, init, trainable);
  w.weight->bf16_only = true;
  if (bias) w.bias = &table.add(name + ".bias", {out}, init, trainable);
  return w;
}

nn::Linear add_dense(ParameterTable& table, const std::string& name, std::int64_t out,
                     std::int64_t in, bool trainable) {
  nn::Linear l;
  l.weight = &table.add(name + ".weight", {out, in}, within(in), trainable);
  l.weight->bf16_only = true;
  l.bias = &table.add(name + ".bias", {out}, within(in), trainable);
  return l;
}

nn::NormWeights add_norm(ParameterTable& table, const std::string& name, std::int64_t channels,
                         bool trainable) {
  nn::NormWeights n;
  n.weight = &table.add(name + ".weight", {channels}, {Init::Kind::constant, 1.0f}, trainable);
  n.bias = &table.add(name + ".bias", {channels}, {Init::Kind::constant, 0.0f}, trainable);
  return n;
}

}  // namespace weft
