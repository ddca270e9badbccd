#include "models/video_vae/patch_gan.h"

#include <algorithm>
#include <cmath>

#include "nn/conv.h"

namespace weft {
namespace {

constexpr int kernel = 4;
constexpr float slope = 0.2f, batch_norm_eps = 1e-5f, initial_deviation = 0.02f;
constexpr std::int64_t filters = 64;

// BatchNorm in training: a group for each channel, over all frames.
Var batch_norm(nn::Context c, const Var& x, const nn::NormWeights& w, float eps) {
  return nn::group_norm(c, x, w, static_cast<int>(x->value.dim(-1)), eps, false);
}

}  // namespace

PatchGan::PatchGan(ParameterTable& params, const std::string& prefix) : prefix_(prefix) {
  const auto add = [&](const std::string& name, const Shape& shape, Init init) {
    Parameter& p = params.add(prefix + "main." + name, shape, init);
    p.group = 1;
    return &p;
  };
  // Numbers in the original's list of modules: convolution, norm, activation; the first layer has
  // no norm.
  int number = 0;
  std::int64_t in = 3;
  const auto layer = [&](std::int64_t out, int stride, bool norm, bool last) {
    Layer l;
    l.stride = stride;
    const std::string conv = std::to_string(number++);
    l.conv.weight =
        add(conv + ".weight", {out, in, kernel, kernel}, {Init::Kind::normal, initial_deviation});
    const auto fan_in = static_cast<float>(in * kernel * kernel);
    if (!norm)  // a norm brings its own bias
      l.conv.bias = add(conv + ".bias", {out}, {Init::Kind::uniform, 1.0f / std::sqrt(fan_in)});
    if (norm) {
      const std::string name = std::to_string(number++);
      l.norm.weight = add(name + ".weight", {out}, {Init::Kind::constant, 1});
      l.norm.bias = add(name + ".bias", {out}, {Init::Kind::constant, 0});
    }
    if (!last) ++number;  // the activation
    layers_.push_back(l);
    in = out;
  };
  layer(filters, 2, false, false);
  layer(2 * filters, 2, true, false);
  layer(4 * filters, 2, true, false);
  layer(8 * filters, 1, true, false);
  layer(1, 1, false, true);
}

template <class X>
X PatchGan::through_layers(nn::Context c, X x) const {
  for (const Layer& l : layers_) {
    ops::Conv geometry = ops::Conv::same(kernel);
    geometry.stride = l.stride;
    geometry.top = geometry.left = geometry.bottom = geometry.right = 1;
    x = nn::conv(c, x, l.conv, geometry);
    if (l.norm.weight != nullptr) x = batch_norm(c, x, l.norm, batch_norm_eps);
    if (&l != &layers_.back()) x = nn::leaky_relu(c, x, slope);
  }
  return x;
}

Var PatchGan::forward(nn::Context c, const Var& frames) const { return through_layers(c, frames); }

nn::Dual PatchGan::forward(nn::Context c, const nn::Dual& frames) const {
  return through_layers(c, frames);
}

}  // namespace weft
