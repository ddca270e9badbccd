#include "models/resnet/resnet.h"

#include <utility>

#include "core/error.h"
#include "nn/image_ops.h"

namespace weft {

using nn::Activation;

ResidualBlock add_residual_block(ConvNet& net, const std::string& name, const Feature& in,
                                 const ResidualShape& s) {
  ResidualBlock block;
  Feature at = in;
  const auto add = [&](std::int64_t out, const ops::Conv& geometry) {
    const std::string number = std::to_string(block.convs.size() + 1);
    block.convs.push_back(
        net.add(name + ".conv" + number, name + ".bn" + number, at, out, geometry));
    at = block.convs.back().out;
  };
  const std::int64_t out = s.planes * s.expansion;
  block.averages = s.average_down && s.stride == 2;
  if (s.bottleneck) {
    add(s.planes, ops::Conv::same(1));
    const Feature before = at;
    add(s.planes, ops::Conv::strided(3, block.averages ? 1 : s.stride, s.dilation, s.groups));
    if (s.deformable) net.make_deformable(name + ".conv2", before, block.convs.back());
    if (block.averages) at.rate *= 2;
    add(out, ops::Conv::same(1));
  } else {
    add(s.planes, ops::Conv::strided(3, s.stride, s.dilation));
    add(out, ops::Conv::strided(3, 1, s.later_dilation));
  }
  if (s.stride != 1 || in.channels != out) {
    const int first = s.average_down ? 1 : 0;
    Feature from = in;
    if (block.averages) from.rate *= 2;
    block.downsample = net.add(fmt::format("{}.downsample.{}", name, first),
                               fmt::format("{}.downsample.{}", name, first + 1), from, out,
                               ops::Conv::strided(1, block.averages ? 1 : s.stride));
  }
  return block;
}

std::vector<Var> residual_blocks(nn::Context c, std::vector<Var> xs,
                                 const std::vector<const ResidualBlock*>& blocks,
                                 nn::BatchNormGroup& group) {
  WEFT_ASSERT(!xs.empty() && xs.size() == blocks.size());
  const std::size_t convs = blocks.front()->convs.size();
  std::vector<Var> inner = xs;
  for (std::size_t k = 0; k + 1 < convs; ++k) {
    std::vector<ConvNormCall> calls;
    for (std::size_t i = 0; i < blocks.size(); ++i)
      calls.push_back({inner[i], &blocks[i]->convs[k]});
    inner = conv_norms(c, calls, group);
    for (std::size_t i = 0; i < blocks.size(); ++i)
      if (blocks[i]->averages && k == 1) inner[i] = nn::average_pool_2x2(c, inner[i]);
  }
  std::vector<nn::BatchNormCall> last;
  std::vector<std::size_t> of;  // whose block each of them is
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    const ResidualBlock& b = *blocks[i];
    const Var y = convolve(c, std::exchange(inner[i], nullptr), b.convs.back());
    const nn::BatchNorm* norm = &b.convs.back().norm;
    if (b.downsample) {
      if (b.averages) xs[i] = nn::average_pool_2x2(c, xs[i]);
      const Var identity = convolve(c, xs[i], *b.downsample);
      xs[i] = nn::batch_norm_add(c, {y, norm}, {identity, &b.downsample->norm}, group,
                                 Activation::relu);
    } else {
      last.push_back({y, norm, Activation::relu, xs[i]});
      of.push_back(i);
    }
  }
  if (last.empty()) return xs;
  const std::vector<Var> out = nn::batch_norms(c, last, group);
  for (std::size_t k = 0; k < of.size(); ++k) xs[of[k]] = out[k];
  return xs;
}

Var residual_block(nn::Context c, const Var& x, const ResidualBlock& block,
                   nn::BatchNormGroup& group) {
  return residual_blocks(c, {x}, {&block}, group).front();
}

ResNet::ResNet(ConvNet& net, const ResNetShape& shape) : clip_(shape.clip) {
  WEFT_ASSERT(!(shape.clip || shape.deformable) || shape.bottleneck);
  Feature at{3, 1};
  for (std::size_t i = 0; i < shape.stem.size(); ++i) {
    const std::string conv = fmt::format("{}{}", clip_ ? "stem." : "conv", clip_ ? 3 * i : i + 1);
    const std::string norm = fmt::format("{}{}", clip_ ? "stem." : "bn", clip_ ? 3 * i + 1 : i + 1);
    stem_.push_back(net.add(conv, norm, at, shape.stem[i],
                            ops::Conv::strided(shape.stem.size() == 1 ? 7 : 3, i == 0 ? 2 : 1)));
    at = stem_.back().out;
  }
  at.rate *= 2;  // max pooling
  ResidualShape block{.bottleneck = shape.bottleneck,
                      .planes = shape.planes,
                      .expansion = shape.expansion,
                      .groups = shape.groups,
                      .average_down = shape.clip};
  for (std::size_t l = 0; l < 4; ++l, block.planes *= 2) {
    // A layer that would go beyond the output stride keeps its input's size. Its convolutions are
    // dilated by what strides have been left out so far, the one that carried the stride by those
    // before it (docs/models/segmentation.md, ResNet).
    const bool halves = l > 0 && at.rate < shape.output_stride;
    block.deformable = shape.deformable && l > 0;
    const int before = block.later_dilation, dilation = l > 0 && !halves ? 2 * before : before;
    for (int b = 0; b < shape.blocks[l]; ++b) {
      block.stride = b == 0 && halves ? 2 : 1;
      block.dilation = b == 0 ? before : dilation;
      block.later_dilation = dilation;
      layers_[l].push_back(add_residual_block(net, fmt::format("layer{}.{}", l + 1, b), at, block));
      at = layers_[l].back().out();
    }
  }
}

std::vector<Feature> ResNet::features() const {
  std::vector<Feature> all;
  for (const auto& layer : layers_) all.push_back(layer.back().out());
  return all;
}

std::int64_t ResNet::blocks() const {
  std::size_t n = 0;
  for (const auto& layer : layers_) n += layer.size();
  return static_cast<std::int64_t>(n);
}

std::vector<Var> ResNet::forward(nn::Context c, const Var& image, nn::BatchNormGroup& group,
                                 std::int64_t recomputed) const {
  Var x = image;
  for (const ConvNorm& layer : stem_) x = conv_norm(c, x, layer, group, Activation::relu);
  x = clip_ ? nn::average_pool_2x2(c, x) : nn::max_pool_3x3(c, x);
  std::vector<Var> maps;
  std::int64_t index = 0;
  for (const auto& layer : layers_) {
    for (const ResidualBlock& block : layer) {
      if (index++ < recomputed)
        x = recompute(c.tape, [&table = c.parameters, &block, &group, input = x](Tape& t) {
          return residual_block({t, table}, input, block, group);
        });
      else
        x = residual_block(c, x, block, group);
    }
    maps.push_back(x);
  }
  return maps;
}

}  // namespace weft
