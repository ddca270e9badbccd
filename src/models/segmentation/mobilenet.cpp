#include "models/segmentation/mobilenet.h"

#include <algorithm>
#include <array>

#include "core/error.h"

namespace weft {
namespace {

using nn::Activation;

// Blocks that follow each other: expansion of the channels inside, output channels, how many, and
// the stride of the first.
struct Stage {
  std::int64_t expansion, channels;
  int blocks, stride;
};
constexpr Stage stages[] = {{1, 16, 1, 1}, {6, 24, 2, 2},  {6, 32, 3, 2}, {6, 64, 4, 2},
                            {6, 96, 3, 1}, {6, 160, 3, 2}, {6, 320, 1, 1}};
constexpr int output_stride = 8;
constexpr std::array taps = {2, 4, 7, 14, 17};  // blocks, counted from 1

bool is_tap(int block) { return std::ranges::find(taps, block) != taps.end(); }

}  // namespace

MobileNet::MobileNet(ConvNet& net) {
  stem_ = net.add("features.0.0", "features.0.1", {3, 1}, 32, ops::Conv::strided(3, 2));
  Feature at = stem_.out;
  int number = 1, dilation = 1;
  for (const Stage& s : stages)
    for (int b = 0; b < s.blocks; ++b, ++number) {
      const bool strided = b == 0 && s.stride == 2, halves = strided && at.rate < output_stride;
      const int before = dilation;
      if (strided && !halves) dilation *= 2;
      Block block;
      block.residual = !strided && at.channels == s.channels;
      const std::int64_t inner = at.channels * s.expansion;
      // Numbers in the original's list of modules: convolution, norm and, but for the last,
      // activation.
      int module = 0;
      const auto add = [&](std::int64_t out, const ops::Conv& geometry) {
        const std::string name = fmt::format("features.{}.conv.", number);
        block.convs.push_back(net.add(name + std::to_string(module),
                                      name + std::to_string(module + 1), at, out, geometry));
        at = block.convs.back().out;
        module += 3;
      };
      if (s.expansion > 1) add(inner, ops::Conv::same(1));
      add(inner, ops::Conv::strided(3, halves ? 2 : 1, strided ? before : dilation,
                                    static_cast<int>(inner)));
      add(s.channels, ops::Conv::same(1));
      blocks_.push_back(std::move(block));
    }
}

std::vector<Feature> MobileNet::features() const {
  std::vector<Feature> all;
  for (const int tap : taps)
    all.push_back(blocks_[static_cast<std::size_t>(tap) - 1].convs.back().out);
  return all;
}

Var MobileNet::run(nn::Context c, const Var& x, const Block& block, nn::BatchNormGroup& group) {
  Var y = x;
  for (const ConvNorm& layer : block.convs) {
    const bool last = &layer == &block.convs.back();
    y = conv_norm(c, y, layer, group, last ? Activation::none : Activation::relu6,
                  last && block.residual ? x : nullptr);
  }
  return y;
}

std::vector<Var> MobileNet::forward(nn::Context c, const Var& image, nn::BatchNormGroup& group,
                                    std::int64_t recomputed) const {
  Var x = conv_norm(c, image, stem_, group, Activation::relu6);
  std::vector<Var> maps;
  int number = 1;
  for (const Block& block : blocks_) {
    if (number <= recomputed)
      x = recompute(c.tape, [&table = c.parameters, &block, &group, input = x](Tape& t) {
        return run({t, table}, input, block, group);
      });
    else
      x = run(c, x, block, group);
    if (is_tap(number++)) maps.push_back(x);
  }
  return maps;
}

}  // namespace weft
