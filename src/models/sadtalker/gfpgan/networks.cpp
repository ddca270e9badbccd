#include "models/sadtalker/gfpgan/networks.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "core/error.h"
#include "core/philox.h"
#include "ops/conv.h"
#include "ops/layout.h"
#include "ops/loss.h"
#include "ops/matmul.h"
#include "ops/pointwise.h"
#include "ops/random.h"
#include "ops/resize.h"

namespace weft {
namespace {

constexpr float slope = 0.2f, demodulation_eps = 1e-8f;
constexpr std::int64_t first_side = 4;
const ops::Conv conv3 = ops::Conv::same(3), conv1 = ops::Conv::same(1);

Tensor resized(const Tensor& x, std::int64_t side) {
  Tensor y = Tensor::empty({x.dim(0), x.dim(1), side, side, x.dim(4)}, x.dtype());
  // Halved, a pixel lies in the middle of four: bilinear weights are their mean.
  if (side < x.dim(2))
    ops::average_pool_2x2_forward(x, y);
  else
    ops::bilinear_forward(x, y, false);
  return y;
}

Init normal(std::int64_t fan_in) {
  return Init::normal(1 / std::sqrt(static_cast<double>(fan_in)));
}

}  // namespace

WeightNames restorer_names() {
  WeightNames names;
  names.spare = [](const std::string& name) {
    return name.starts_with("toRGB.") || name.starts_with("stylegan_decoder.style_mlp.") ||
           name.starts_with("stylegan_decoder.noises.");
  };
  return names;
}

std::int64_t Restorer::channels(std::int64_t side) const {
  return side <= 64 ? size_.most_channels : size_.most_channels * 64 / side;
}

Restorer::Residual Restorer::add_residual(const std::string& name, std::int64_t in,
                                          std::int64_t out, std::int64_t side, std::int64_t to) {
  Residual r;
  r.first = add_conv3(name + ".conv1", in, in, side);
  r.second = add_conv3(name + ".conv2", in, out, to);
  r.skip = net_.add(name + ".skip", "", in, out, conv1);
  const std::int64_t small = std::min(side, to);
  multiply_adds_ += static_cast<double>(in * out * small * small);
  return r;
}

const ConvLayer* Restorer::add_conv3(const std::string& name, std::int64_t in, std::int64_t out,
                                     std::int64_t side) {
  multiply_adds_ += static_cast<double>(9 * in * out * side * side);
  return net_.add(name, "", in, out, conv3, true);
}

Restorer::Modulated Restorer::add_modulated(const std::string& name, std::int64_t in,
                                            std::int64_t out, int kernel, std::int64_t side) {
  const std::int64_t taps = kernel * kernel;
  multiply_adds_ += static_cast<double>(taps * in * out * side * side + in * size_.features);
  Modulated m;
  const std::string conv = name + ".modulated_conv";
  m.weight = &params_.add(conv + ".weight", {1, out, in, kernel, kernel}, normal(in * taps));
  m.weight->bf16_only = kernel > 1;
  m.style_weight =
      &params_.add(conv + ".modulation.weight", {in, size_.features}, normal(size_.features));
  m.style_bias = &params_.add(conv + ".modulation.bias", {in}, Init::constant(1));
  if (kernel > 1) m.noise = &params_.add(name + ".weight", {1}, {});
  m.bias = &params_.add(name + ".bias", {1, out, 1, 1}, {});
  return m;
}

Restorer::Restorer(const RestorerSize& size) : size_(size), net_(params_, "") {
  while (first_side << levels_ < size_.side) ++levels_;
  WEFT_ASSERT(first_side << levels_ == size_.side && levels_ >= 1 && channels(size_.side) % 4 == 0);
  const auto side = [](int level) { return first_side << level; };  // level 0: 4x4
  const auto half = [&](int level) { return channels(side(level)) / 2; };
  first_ = net_.add("conv_body_first", "", 3, half(levels_), conv1, true);
  multiply_adds_ += static_cast<double>(3 * half(levels_) * size_.side * size_.side);
  for (int i = 0; i < levels_; ++i)
    down_.push_back(add_residual(fmt::format("conv_body_down.{}", i), half(levels_ - i),
                                 half(levels_ - i - 1), side(levels_ - i), side(levels_ - i - 1)));
  final_ = add_conv3("final_conv", half(0), half(0), first_side);
  const std::int64_t values = half(0) * first_side * first_side,
                     latents = (2 * levels_ + 2) * size_.features;
  final_weight_ = &params_.add("final_linear.weight", {latents, values}, normal(values));
  final_bias_ = &params_.add("final_linear.bias", {latents}, {});
  multiply_adds_ += static_cast<double>(latents * values);
  for (int i = 0; i < levels_; ++i)
    up_.push_back(add_residual(fmt::format("conv_body_up.{}", i), half(i), half(i + 1), side(i),
                               side(i + 1)));
  for (int i = 0; i < levels_; ++i) {
    const std::int64_t n = half(i + 1);
    const auto add = [&](const char* what, int k) {
      return add_conv3(fmt::format("condition_{}.{}.{}", what, i, k), n, n, side(i + 1));
    };
    conditions_.push_back({add("scale", 0), add("scale", 2), add("shift", 0), add("shift", 2)});
  }
  const std::string decoder = "stylegan_decoder.";
  const std::int64_t bottom = channels(first_side);
  constant_ = &params_.add(decoder + "constant_input.weight", {1, bottom, first_side, first_side},
                           Init::normal(1));
  start_ = add_modulated(decoder + "style_conv1", bottom, bottom, 3, first_side);
  start_rgb_ = add_modulated(decoder + "to_rgb1", bottom, 3, 1, first_side);
  for (int i = 0; i < levels_; ++i) {
    const std::int64_t s = side(i + 1), in = channels(side(i)), out = channels(s);
    const auto conv = [&](int k) { return fmt::format("{}style_convs.{}", decoder, k); };
    convs_.push_back(add_modulated(conv(2 * i), in, out, 3, s));
    convs_.push_back(add_modulated(conv(2 * i + 1), out, out, 3, s));
    rgbs_.push_back(add_modulated(fmt::format("{}to_rgbs.{}", decoder, i), out, 3, 1, s));
  }
}

void Restorer::prepare() {
  net_.fold();
  const auto measure = [](Modulated& m) {
    m.energy = Tensor::persistent({m.weight->shape[1], m.weight->shape[2]}, DType::f32);
    ops::weight_energy(stored(*m.weight), m.energy);
  };
  measure(start_);
  for (Modulated& m : convs_) measure(m);
  const std::int64_t C = constant_->shape[1], places = first_side * first_side;
  const Tensor first = constant_->value.to_host();
  std::vector<float> last(C * places);
  for (std::int64_t c = 0; c < C; ++c)
    for (std::int64_t p = 0; p < places; ++p) last[p * C + c] = first.span<float>()[c * places + p];
  const Shape shape{1, 1, first_side, first_side, C};
  constant_last_ = Tensor::persistent(shape, DType::f32);
  constant_last_.set(std::span<const float>(last));
}

std::vector<std::int64_t> Restorer::noise_sides() const {
  std::vector<std::int64_t> sides{first_side};
  for (int i = 1; i <= levels_; ++i) sides.insert(sides.end(), 2, first_side << i);
  return sides;
}

std::vector<Tensor> Restorer::draw_noise(std::uint64_t key, std::uint64_t face) const {
  std::vector<Tensor> noise;
  for (const std::int64_t s : noise_sides()) {
    const std::uint64_t layer = noise.size();
    noise.push_back(Tensor::empty({s * s}, DType::f32));
    ops::fill_normal(key, static_cast<int>(Purpose::noise), face, layer, noise.back());
    noise.back() = noise.back().view({1, 1, s, s});
  }
  return noise;
}

// s f32 [1,in] of a layer that takes the latent vector k.
Tensor Restorer::style(const Modulated& layer, const Tensor& latents, std::int64_t k) const {
  Tensor s = Tensor::empty({1, layer.style_weight->shape[0]}, DType::f32);
  ops::linear_forward(latents.slice(k, k + 1), layer.style_weight->value, layer.style_bias->value,
                      {}, s);
  return s;
}

Tensor Restorer::style_conv(const Modulated& layer, Tensor x, const Tensor& latents, std::int64_t k,
                            const Tensor& noise, bool up, const Tensor& scale,
                            const Tensor& shift) const {
  const Tensor s = style(layer, latents, k);
  const Tensor& w = stored(*layer.weight);
  const std::int64_t out = w.dim(1), side = x.dim(2) * (up ? 2 : 1);
  Tensor d = Tensor::empty({1, out}, DType::f32);
  ops::demodulation(layer.energy, s, std::sqrt(2.0f), demodulation_eps, d);
  Tensor styled = up ? Tensor::empty({1, 1, side, side, x.dim(4)}, x.dtype()) : x;
  ops::modulate(x, s, styled);
  x.release();
  Tensor y = Tensor::empty({1, 1, side, side, out}, styled.dtype());
  ops::conv_forward(styled, w.view({out, w.dim(2), w.dim(3), w.dim(4)}), {}, {}, conv3, y);
  ops::modulated_finish(y, d, noise, layer.noise->value, layer.bias->value.view({out}), slope,
                        scale, shift, y);
  return y;
}

Tensor Restorer::to_rgb(const Modulated& layer, const Tensor& x, const Tensor& latents,
                        std::int64_t k, const Tensor& before) const {
  Tensor rgb = Tensor::empty({1, 1, x.dim(2), x.dim(3), 3}, DType::f32);
  ops::modulated_rgb(x, style(layer, latents, k), layer.weight->value.view({3, x.dim(4)}),
                     layer.bias->value.view({3}), before, rgb);
  return rgb;
}

Tensor Restorer::run(const Tensor& image, std::span<const Tensor> noise) const {
  WEFT_ASSERT(image.shape() == Shape({1, 1, size_.side, size_.side, 3}) &&
              std::ssize(noise) == 2 * levels_ + 1);
  const DType dtype = image.dtype();
  // Down: each level's map is kept for the way up.
  Tensor x = convolve(*first_, image, slope);
  std::vector<Tensor> maps;
  for (const Residual& r : down_) {
    const std::int64_t to = x.dim(2) / 2;
    Tensor y = convolve(*r.first, x, slope);
    y = resized(y, to);
    y = convolve(*r.second, y, slope);
    x = convolve(*r.skip, resized(x, to), 1, y);
    maps.push_back(x);
  }
  x = convolve(*final_, x, slope);

  // Latent vectors f32 [L,features], from the values in PyTorch's order.
  Tensor latents;
  {
    const std::int64_t C = x.dim(4);
    Tensor first = Tensor::empty({1, C, 1, first_side, first_side}, dtype),
           values = Tensor::empty(first.shape(), DType::f32);
    ops::to_channels_first(x, first);
    ops::convert(first, values);
    latents = Tensor::empty({1, final_bias_->shape[0]}, DType::f32);
    ops::linear_forward(values.view({1, C * first_side * first_side}), final_weight_->value,
                        final_bias_->value, {}, latents);
    latents = latents.view({2 * levels_ + 2, size_.features});
  }

  // Up, and beside it, level by level, the face.
  Tensor drawn = Tensor::empty(constant_last_.shape(), dtype);
  ops::convert(constant_last_, drawn);
  drawn = style_conv(start_, std::exchange(drawn, {}), latents, 0, noise[0], false);
  Tensor rgb = to_rgb(start_rgb_, drawn, latents, 1, {});
  for (int i = 0; i < levels_; ++i) {
    const auto n = static_cast<std::size_t>(i);
    const Residual& r = up_[n];
    ops::add_inplace(maps.back(), x);
    maps.pop_back();
    const std::int64_t to = 2 * x.dim(2);
    Tensor y = convolve(*r.first, x, slope);
    y = resized(y, to);
    y = convolve(*r.second, y, slope);
    // A 1x1 convolution without bias and a resizing may change places: a quarter of the products.
    ops::bilinear_forward(convolve(*r.skip, x), y, true);
    x = std::exchange(y, {});
    const Condition& c = conditions_[n];
    const Tensor scale = convolve(*c.scale_out, convolve(*c.scale_in, x, slope)),
                 shift = convolve(*c.shift_out, convolve(*c.shift_in, x, slope));
    drawn = style_conv(convs_[2 * n], std::exchange(drawn, {}), latents, 1 + 2 * i,
                       noise[1 + 2 * n], true, scale, shift);
    drawn = style_conv(convs_[2 * n + 1], std::exchange(drawn, {}), latents, 2 + 2 * i,
                       noise[2 + 2 * n], false);
    rgb = to_rgb(rgbs_[n], drawn, latents, 3 + 2 * i, rgb);
  }
  return rgb;
}

namespace {

constexpr float parse_slope = 0.2f;
constexpr int steps = 4, depth = 10;

// 3x3 over a frame that has its border already.
ops::Conv bordered(int stride) { return {1, 3, 3, 1, stride, 0, 0, 0, 0, 0, false}; }

Tensor with_border(const Tensor& x, int up = 1) {
  Tensor y = Tensor::empty({x.dim(0), x.dim(1), up * x.dim(2) + 2, up * x.dim(3) + 2, x.dim(4)},
                           x.dtype());
  ops::reflect_border(x, up, y);
  return y;
}

}  // namespace

WeightNames parse_net_names() {
  WeightNames names;
  names.spare = [](const std::string& name) { return name.starts_with("out_img_conv."); };
  return names;
}

ParseNet::ParseNet(std::int64_t channels) : net_(params_, "") {
  const auto at = [&](int level) { return std::min(channels << level, 4 * channels); };
  stem_ = net_.add("encoder.0.conv2d", "", 3, channels, bordered(1), true);
  for (int i = 0; i < steps; ++i)
    encoder_.push_back(add_block(fmt::format("encoder.{}", i + 1), at(i), at(i + 1), 2, 1));
  for (int i = 0; i < depth; ++i)
    body_.push_back(add_block(fmt::format("body.{}", i), at(steps), at(steps), 1, 1));
  for (int i = 0; i < steps; ++i)
    decoder_.push_back(
        add_block(fmt::format("decoder.{}", i), at(steps - i), at(steps - i - 1), 1, 2));
  head_ = net_.add("out_mask_conv.conv2d", "", channels, classes, bordered(1), true);
}

ParseNet::Block ParseNet::add_block(const std::string& name, std::int64_t in, std::int64_t out,
                                    int down, int up) {
  Block b;
  b.up = up;
  if (down > 1 || up > 1 || in != out)
    b.shortcut = net_.add(name + ".shortcut_func.conv2d", "", in, out, bordered(down), true);
  b.first = net_.add(name + ".conv1.conv2d", name + ".conv1.norm.norm", in, out, bordered(1));
  b.second = net_.add(name + ".conv2.conv2d", name + ".conv2.norm.norm", out, out, bordered(down));
  return b;
}

Tensor ParseNet::run(const Block& block, const Tensor& x) const {
  Tensor seen = with_border(x, block.up);
  const Tensor shortcut = block.shortcut ? convolve(*block.shortcut, seen) : x;
  Tensor y = convolve(*block.first, seen, parse_slope);
  seen.release();
  y = with_border(y);
  return convolve(*block.second, y, 1, shortcut);
}

Tensor ParseNet::logits(const Tensor& image) const {
  WEFT_ASSERT(image.dim(0) == 1 && image.dim(2) % multiple == 0 && image.dim(3) % multiple == 0 &&
              image.dim(2) >= 32 && image.dim(3) >= 32);
  Tensor x = convolve(*stem_, with_border(image));
  for (const Block& b : encoder_) x = run(b, x);
  Tensor y = x;
  for (const Block& b : body_) y = run(b, y);
  ops::add_inplace(x, y);
  x = std::exchange(y, {});
  for (const Block& b : decoder_) x = run(b, x);
  return convolve(*head_, with_border(x));
}

Tensor ParseNet::parse(const Tensor& image) const {
  const Tensor scores[] = {logits(image)};
  Tensor found = Tensor::empty({image.dim(2), image.dim(3)}, DType::u8),
         counts = Tensor::empty({3, classes}, DType::i64), none;
  ops::predict_classes(found, scores, none, counts, none);
  return found;
}

double ParseNet::flops(std::int64_t height, std::int64_t width) const {
  return operations_of([&] {
    logits(Tensor::empty({1, 1, height, width, 3}, stem_->weight.dtype()));
  });
}

}  // namespace weft
