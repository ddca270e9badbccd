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
  const auto add = [&](std::int64_t out, const ops::Conv& geometry, bool deformable = false) {
    const std::string number = std::to_string(block.convs.size() + 1),
                      conv = name + ".conv" + number, norm = name + ".bn" + number;
    block.convs.push_back(deformable ? net.add_deformable(conv, norm, at, out, geometry)
                                     : net.add(conv, norm, at, out, geometry));
    at = block.convs.back()->out;
  };
  const std::int64_t out = s.planes * s.expansion;
  block.averages = s.average_down && s.stride == 2;
  if (s.bottleneck) {
    add(s.planes, ops::Conv::same(1));
    add(s.planes, ops::Conv::strided(3, block.averages ? 1 : s.stride, s.dilation, s.groups),
        s.deformable);
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
  // All but the last convolution of each block.
  std::vector<Var> inner = xs;
  for (std::size_t k = 0; k + 1 < convs; ++k) {
    std::vector<ConvNormCall> calls;
    for (std::size_t i = 0; i < blocks.size(); ++i)
      calls.push_back({std::move(inner[i]), blocks[i]->convs[k]});
    inner = conv_norms(c, std::move(calls), group);
    for (std::size_t i = 0; i < blocks.size(); ++i)
      if (blocks[i]->averages && k == 1) inner[i] = nn::average_pool_2x2(c, inner[i]);
  }
  // The last one and what is added to it.
  std::vector<ConvNormCall> last;
  std::vector<std::size_t> of;  // whose block each of them is
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    const ResidualBlock& b = *blocks[i];
    Var x = std::exchange(xs[i], nullptr);
    ConvNormCall call{std::move(inner[i]), b.convs.back()};
    if (b.downsample != nullptr) {
      if (b.averages) x = nn::average_pool_2x2(c, x);
      xs[i] = conv_norm_add(c, std::move(call), {std::move(x), b.downsample}, group);
    } else {
      call.residual = std::move(x);
      last.push_back(std::move(call));
      of.push_back(i);
    }
  }
  if (last.empty()) return xs;
  const std::vector<Var> out = conv_norms(c, std::move(last), group);
  for (std::size_t k = 0; k < of.size(); ++k) xs[of[k]] = out[k];
  return xs;
}

Var residual_block(nn::Context c, Var x, const ResidualBlock& block, nn::BatchNormGroup& group) {
  std::vector<Var> xs(1);
  xs[0] = std::move(x);  // nothing else holds it, where the caller does not
  return residual_blocks(c, std::move(xs), {&block}, group).front();
}

ResNet::ResNet(ConvNet& net, const ResNetShape& shape) : clip_(shape.clip) {
  WEFT_ASSERT(!(shape.clip || shape.deformable) || shape.bottleneck);
  Feature at{3, 1};
  for (std::size_t i = 0; i < shape.stem.size(); ++i) {
    const std::string conv = fmt::format("{}{}", clip_ ? "stem." : "conv", clip_ ? 3 * i : i + 1);
    const std::string norm = fmt::format("{}{}", clip_ ? "stem." : "bn", clip_ ? 3 * i + 1 : i + 1);
    stem_.push_back(net.add(conv, norm, at, shape.stem[i],
                            ops::Conv::strided(shape.stem.size() == 1 ? 7 : 3, i == 0 ? 2 : 1)));
    at = stem_.back()->out;
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
  for (const ConvLayer* layer : stem_) x = conv_norm(c, x, *layer, group, Activation::relu);
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
        x = residual_block(c, std::exchange(x, nullptr), block, group);
    }
    maps.push_back(x);
  }
  return maps;
}

std::vector<Tensor> ResNet::forward(const Tensor& image) const {
  Tape tape(Tape::Mode::infer);
  ParameterTable none;  // folded layers read their own tensors
  nn::BatchNormGroup alone;
  std::vector<Tensor> maps;
  for (const Var& map : forward({tape, none}, make_var(image, false), alone, 0))
    maps.push_back(map->value);
  return maps;
}

}  // namespace weft
