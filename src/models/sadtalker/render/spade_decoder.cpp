#include "models/sadtalker/render/spade_decoder.h"

#include <algorithm>

#include "core/error.h"
#include "ops/norm.h"

namespace weft {
namespace {

constexpr std::int64_t hidden = 128;
constexpr float slope = 0.2f;

Tensor statistics_of(const Tensor& x) {
  Tensor s = Tensor::empty({x.dim(0), 2, x.dim(4)}, DType::f32);
  ops::instance_statistics(x, s);
  return s;
}

}  // namespace

SpadeDecoder::Block SpadeDecoder::add(FoldedNet& net, const std::string& name,
                                      std::int64_t channels, std::int64_t out, int scale) {
  const std::int64_t middle = std::min(channels, out);
  const ops::Conv same = ops::Conv::same(3);
  const auto norm = [&](const char* which, std::int64_t C) {
    const std::string start = name + which;
    Norm n{
        net.add(start + "mlp_shared.0", "", in, hidden, scale == 2 ? ops::Conv::up() : same, true),
        net.add_joined({start + "mlp_gamma", start + "mlp_beta"}, hidden, C, same, true),
        {}};
    if (scale == 4) n.quadruple.emplace(n.shared);
    return n;
  };
  Block b;
  b.upsample = scale > 1;
  b.conv_0 = net.add_spectral(name + "conv_0", channels, middle, same, true);
  b.conv_1 = net.add_spectral(name + "conv_1", middle, out, same, true);
  b.norm_0 = norm("norm_0.", channels);
  b.norm_1 = norm("norm_1.", middle);
  if (channels == out) return b;
  b.conv_s = net.add_spectral(name + "conv_s", channels, out, ops::Conv::same(1));
  b.norm_s = norm("norm_s.", channels);
  return b;
}

SpadeDecoder::SpadeDecoder(FoldedNet& net) {
  const std::string before = net.prefix;
  net.prefix += "decoder.";
  first_ = net.add("fc", "", in, 512, ops::Conv::same(3), true);
  for (std::size_t i = 0; i < middle_.size(); ++i)
    middle_[i] = add(net, fmt::format("G_middle_{}.", i), 512, 512, 1);
  up_[0] = add(net, "up_0.", 512, 256, 2);
  up_[1] = add(net, "up_1.", 256, 64, 4);
  picture_ = net.add("conv_img", "", 64, 3, ops::Conv::same(3), true);
  net.prefix = before;
}

void SpadeDecoder::fold() {
  for (Norm* n : {&up_[1].norm_0, &up_[1].norm_1, &up_[1].norm_s}) n->quadruple->fold();
}

Tensor SpadeDecoder::run(const Block& b, const Tensor& x, const Tensor& features,
                         float slope_behind) {
  const auto gamma_beta = [&](const Norm& n) {
    return convolve(*n.gamma_beta, n.quadruple ? n.quadruple->forward(features, 0)
                                               : convolve(*n.shared, features, 0));
  };
  // Both norms of x, which is read at the block's size.
  const Tensor statistics = statistics_of(x);
  const auto normalised = [&](const Norm& n, float s) {
    const Tensor maps = gamma_beta(n);
    Tensor y = Tensor::empty({x.dim(0), 1, maps.dim(2), maps.dim(3), x.dim(4)}, x.dtype());
    ops::spade(x, statistics, maps, b.upsample, s, y);
    return y;
  };
  const Tensor shortcut = b.conv_s == nullptr ? x : convolve(*b.conv_s, normalised(b.norm_s, 1));
  Tensor y = convolve(*b.conv_0, normalised(b.norm_0, slope));
  ops::spade(y, statistics_of(y), gamma_beta(b.norm_1), false, slope, y);
  return convolve(*b.conv_1, y, slope_behind, shortcut);
}

Tensor SpadeDecoder::forward(const Tensor& features) const {
  Tensor x = convolve(*first_, features);
  for (const Block& block : middle_) x = run(block, x, features, 1);
  x = run(up_[0], x, features, 1);
  // Behind the last block only its leaky ReLU is read.
  x = run(up_[1], x, features, slope);
  return convolve(*picture_, x);
}

}  // namespace weft
