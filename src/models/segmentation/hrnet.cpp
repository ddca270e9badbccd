#include "models/segmentation/hrnet.h"

#include <span>
#include <utility>

#include "core/error.h"
#include "nn/image_ops.h"

namespace weft {
namespace {

using nn::Activation;

constexpr std::int64_t width = 48;    // channels of the first branch; each next has twice as many
constexpr int modules[] = {1, 4, 3};  // of the stages with 2, 3 and 4 branches
constexpr int blocks_of_module = 4, blocks_of_layer1 = 4;

}  // namespace

HrNet::Module HrNet::add_module(ConvNet& net, const std::string& name,
                                const std::vector<Feature>& branches) {
  const std::size_t count = branches.size();
  Module m;
  for (int b = 0; b < blocks_of_module; ++b) {
    auto& row = m.rows.emplace_back();
    for (std::size_t i = 0; i < count; ++i)
      row.push_back(add_residual_block(
          net, fmt::format("{}.branches.{}.{}", name, i, b), branches[i],
          {.bottleneck = false, .planes = branches[i].channels, .expansion = 1}));
  }
  m.fuse.resize(count);
  for (std::size_t to = 0; to < count; ++to)
    for (std::size_t from = 0; from < count; ++from) {
      Chain& chain = m.fuse[to].emplace_back();
      const std::string at = fmt::format("{}.fuse_layers.{}.{}", name, to, from);
      if (from > to)
        chain.push_back(net.add(at + ".0", at + ".1", branches[from], branches[to].channels,
                                ops::Conv::same(1)));
      Feature f = branches[from];
      for (std::size_t k = 0; from + k < to; ++k) {
        const std::string step = fmt::format("{}.{}", at, k);
        const bool last = from + k + 1 == to;
        chain.push_back(net.add(step + ".0", step + ".1", f,
                                last ? branches[to].channels : f.channels,
                                ops::Conv::strided(3, 2)));
        f = chain.back().out;
      }
    }
  return m;
}

HrNet::HrNet(ConvNet& net) {
  Feature at{3, 1};
  for (const char* number : {"1", "2"}) {
    stem_.push_back(net.add(std::string("conv") + number, std::string("bn") + number, at, 64,
                            ops::Conv::strided(3, 2)));
    at = stem_.back().out;
  }
  for (int b = 0; b < blocks_of_layer1; ++b) {
    layer1_.push_back(add_residual_block(net, fmt::format("layer1.{}", b), at, {}));
    at = layer1_.back().out();
  }
  std::vector<Feature> branches;
  for (std::size_t s = 0; s < std::size(modules); ++s) {
    Stage stage;
    const std::string transition = fmt::format("transition{}.", s + 1);
    const auto enter = [&](const std::string& name, const Feature& from, std::int64_t channels,
                           int stride) {
      const std::string at_name = transition + name;
      stage.transition.push_back(
          net.add(at_name + ".0", at_name + ".1", from, channels, ops::Conv::strided(3, stride)));
      branches.push_back(stage.transition.back()->out);
    };
    // One more branch, of half the size; the first stage has no branch yet and starts two.
    if (s == 0)
      enter("0", at, width, 1), enter("1.0", at, 2 * width, 2);
    else {
      stage.transition.resize(branches.size());
      const Feature last = branches.back();
      enter(fmt::format("{}.0", branches.size()), last, 2 * last.channels, 2);
    }
    for (int m = 0; m < modules[s]; ++m)
      stage.modules.push_back(add_module(net, fmt::format("stage{}.{}", s + 2, m), branches));
    stages_.push_back(std::move(stage));
  }
  out_ = {0, branches.front().rate};
  for (const Feature& f : branches) out_.channels += f.channels;
}

std::int64_t HrNet::blocks() const {
  std::size_t n = layer1_.size();
  for (const Stage& s : stages_)
    for (const Module& m : s.modules) n += m.rows.size();
  return static_cast<std::int64_t>(n);
}

// relu of the sum of what each branch sends, in the order of the branches. The k-th steps of all
// chains do not depend on each other.
std::vector<Var> HrNet::fuse(nn::Context c, const std::vector<Var>& x, const Module& module,
                             nn::BatchNormGroup& group) {
  const std::size_t count = x.size();
  std::vector<std::vector<Var>> terms(count, x);
  for (std::size_t k = 0;; ++k) {
    std::vector<ConvNormCall> calls;
    std::vector<Var*> places;
    for (std::size_t to = 0; to < count; ++to)
      for (std::size_t from = 0; from < count; ++from) {
        const Chain& chain = module.fuse[to][from];
        if (k >= chain.size()) continue;
        const bool last = k + 1 == chain.size();
        calls.push_back({terms[to][from], &chain[k], last ? Activation::none : Activation::relu});
        places.push_back(&terms[to][from]);
      }
    if (calls.empty()) break;
    std::vector<Var> out = conv_norms(c, calls, group);
    for (std::size_t i = 0; i < out.size(); ++i) *places[i] = std::move(out[i]);
  }
  std::vector<Var> y;
  for (std::vector<Var>& t : terms) y.push_back(nn::sum_relu(c, std::exchange(t, {})));
  return y;
}

std::vector<Var> HrNet::forward(nn::Context c, const Var& image, nn::BatchNormGroup& group,
                                std::int64_t recomputed) const {
  std::int64_t index = 0;
  const auto row = [&](std::vector<Var> x, std::span<const ResidualBlock> blocks) {
    std::vector<const ResidualBlock*> all;
    for (const ResidualBlock& b : blocks) all.push_back(&b);
    if (index++ >= recomputed) return residual_blocks(c, std::move(x), all, group);
    return recompute(c.tape, [&table = c.parameters, &group, all, input = std::move(x)](Tape& t) {
      return residual_blocks({t, table}, input, all, group);
    });
  };
  Var stem = image;
  for (const ConvNorm& layer : stem_) stem = conv_norm(c, stem, layer, group, Activation::relu);
  std::vector<Var> x{std::move(stem)};
  for (const ResidualBlock& block : layer1_) x = row(std::move(x), {&block, 1});
  for (const Stage& stage : stages_) {
    // Where a branch goes on, x has it already; the others come of the last there is.
    std::vector<ConvNormCall> calls;
    std::vector<std::size_t> places;
    for (std::size_t i = 0; i < stage.transition.size(); ++i)
      if (stage.transition[i])
        calls.push_back({x.back(), &*stage.transition[i]}), places.push_back(i);
    x.resize(stage.transition.size());
    std::vector<Var> started = conv_norms(c, calls, group);
    calls.clear();
    for (std::size_t k = 0; k < places.size(); ++k) x[places[k]] = std::move(started[k]);
    for (const Module& m : stage.modules) {
      for (const auto& blocks : m.rows) x = row(std::move(x), blocks);
      x = fuse(c, std::exchange(x, {}), m, group);
    }
  }
  for (std::size_t i = 1; i < x.size(); ++i)
    x[i] = nn::resize_bilinear(c, x[i], x[0]->value.dim(2), x[0]->value.dim(3));
  return {nn::join_channels(c, x)};
}

}  // namespace weft
