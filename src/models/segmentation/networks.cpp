#include "models/segmentation/networks.h"

#include <algorithm>
#include <array>
#include <span>
#include <utility>

#include "core/error.h"
#include "nn/conv.h"
#include "nn/image_ops.h"

namespace weft {
namespace {

using nn::Activation;

// ---- Encoders.

// MobileNetV2 without its last convolution and classifier, dilated to an output stride of 8
// (Sandler et al., arXiv 1801.04381; docs/models/segmentation.md, MobileNetV2).
class MobileNet : public FeatureNet {
 public:
  explicit MobileNet(ConvNet& net);

  std::vector<Feature> features() const override;
  std::int64_t blocks() const override { return static_cast<std::int64_t>(blocks_.size()); }
  // The maps behind blocks 2, 4, 7, 14 and 17.
  std::vector<Var> forward(nn::Context c, const Var& image, nn::BatchNormGroup& group,
                           std::int64_t recomputed) const override;

 private:
  struct Block {
    // Expansion (none in the first block), depthwise, projection.
    std::vector<const ConvLayer*> convs;
    bool residual = false;
  };
  static Var run(nn::Context c, const Var& x, const Block& block, nn::BatchNormGroup& group);
  static bool is_tap(int block) { return std::ranges::find(taps, block) != taps.end(); }
  static constexpr std::array taps = {2, 4, 7, 14, 17};  // blocks, counted from 1

  const ConvLayer* stem_;
  std::vector<Block> blocks_;
};

MobileNet::MobileNet(ConvNet& net)
    : stem_(net.add("features.0.0", "features.0.1", {3, 1}, 32, ops::Conv::strided(3, 2))) {
  // Blocks that follow each other: expansion of the channels inside, output channels, how many, and
  // the stride of the first.
  struct Group {
    std::int64_t expansion, channels;
    int blocks, stride;
  };
  constexpr Group groups[] = {{1, 16, 1, 1}, {6, 24, 2, 2},  {6, 32, 3, 2}, {6, 64, 4, 2},
                              {6, 96, 3, 1}, {6, 160, 3, 2}, {6, 320, 1, 1}};
  constexpr int output_stride = 8;
  Feature at = stem_->out;
  int number = 1, dilation = 1;
  for (const Group& g : groups)
    for (int b = 0; b < g.blocks; ++b, ++number) {
      const bool strided = b == 0 && g.stride == 2, halves = strided && at.rate < output_stride;
      const int before = dilation;
      if (strided && !halves) dilation *= 2;
      Block block;
      block.residual = !strided && at.channels == g.channels;
      const std::int64_t inner = at.channels * g.expansion;
      // Numbers in the original's list of modules: convolution, norm and, but for the last,
      // activation.
      int module = 0;
      const auto add = [&](std::int64_t out, const ops::Conv& geometry) {
        const std::string name = fmt::format("features.{}.conv.", number);
        block.convs.push_back(net.add(name + std::to_string(module),
                                      name + std::to_string(module + 1), at, out, geometry));
        at = block.convs.back()->out;
        module += 3;
      };
      if (g.expansion > 1) add(inner, ops::Conv::same(1));
      add(inner, ops::Conv::strided(3, halves ? 2 : 1, strided ? before : dilation,
                                    static_cast<int>(inner)));
      add(g.channels, ops::Conv::same(1));
      blocks_.push_back(std::move(block));
    }
}

std::vector<Feature> MobileNet::features() const {
  std::vector<Feature> all;
  for (const int tap : taps)
    all.push_back(blocks_[static_cast<std::size_t>(tap) - 1].convs.back()->out);
  return all;
}

Var MobileNet::run(nn::Context c, const Var& x, const Block& block, nn::BatchNormGroup& group) {
  Var y = x;
  for (const ConvLayer* layer : block.convs) {
    const bool last = layer == block.convs.back();
    y = conv_norm(c, y, *layer, group, last ? Activation::none : Activation::relu6,
                  last && block.residual ? x : nullptr);
  }
  return y;
}

std::vector<Var> MobileNet::forward(nn::Context c, const Var& image, nn::BatchNormGroup& group,
                                    std::int64_t recomputed) const {
  Var x = conv_norm(c, image, *stem_, group, Activation::relu6);
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

// HRNetV2-W48 (Sun et al., arXiv 1904.04514; docs/models/segmentation.md, HRNet): branches at 1/4,
// 1/8, 1/16 and 1/32 of the image side by side, which exchange what they found after every module.
class HrNet : public FeatureNet {
 public:
  explicit HrNet(ConvNet& net);

  std::vector<Feature> features() const override { return {out_}; }
  // Rows of blocks: block b of every branch of a module.
  std::int64_t blocks() const override;
  // All branches at 1/4, one map of 720 channels.
  std::vector<Var> forward(nn::Context c, const Var& image, nn::BatchNormGroup& group,
                           std::int64_t recomputed) const override;

 private:
  using Chain = std::vector<const ConvLayer*>;  // each but the last followed by ReLU
  struct Module {
    std::vector<std::vector<ResidualBlock>> rows;  // [block][branch]
    std::vector<std::vector<Chain>> fuse;          // [to][from]; none where to = from
  };
  struct Stage {
    // Into each branch, from the one before or the last; null: the branch goes on.
    std::vector<const ConvLayer*> transition;
    std::vector<Module> modules;
  };
  static Module add_module(ConvNet& net, const std::string& name,
                           const std::vector<Feature>& branches);
  static std::vector<Var> fuse(nn::Context c, const std::vector<Var>& x, const Module& module,
                               nn::BatchNormGroup& group);

  static constexpr std::int64_t width = 48;    // channels of the first branch; each next: twice
  static constexpr int modules[] = {1, 4, 3};  // of the stages with 2, 3 and 4 branches
  static constexpr int blocks_of_module = 4, blocks_of_layer1 = 4;

  std::vector<const ConvLayer*> stem_;
  std::vector<ResidualBlock> layer1_;
  std::vector<Stage> stages_;
  Feature out_;
};

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
  // A finer branch reaches a coarser one by convolutions of stride 2, a coarser one a finer by a
  // 1x1 convolution, whose result is resized.
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
        f = chain.back()->out;
      }
    }
  return m;
}

HrNet::HrNet(ConvNet& net) {
  Feature at{3, 1};
  for (const char* number : {"1", "2"}) {
    stem_.push_back(net.add(std::string("conv") + number, std::string("bn") + number, at, 64,
                            ops::Conv::strided(3, 2)));
    at = stem_.back()->out;
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
        calls.push_back({terms[to][from], chain[k], last ? Activation::none : Activation::relu});
        places.push_back(&terms[to][from]);
      }
    if (calls.empty()) break;
    std::vector<Var> out = conv_norms(c, std::move(calls), group);
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
  for (const ConvLayer* layer : stem_) stem = conv_norm(c, stem, *layer, group, Activation::relu);
  std::vector<Var> x{std::move(stem)};
  for (const ResidualBlock& block : layer1_) x = row(std::move(x), {&block, 1});
  for (const Stage& stage : stages_) {
    // Where a branch goes on, x has it already; the others come of the last there is.
    std::vector<ConvNormCall> calls;
    std::vector<std::size_t> places;
    for (std::size_t i = 0; i < stage.transition.size(); ++i)
      if (stage.transition[i] != nullptr)
        calls.push_back({x.back(), stage.transition[i]}), places.push_back(i);
    x.resize(stage.transition.size());
    std::vector<Var> started = conv_norms(c, std::move(calls), group);
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

// ---- Decoders.

constexpr int pool_sizes[] = {1, 2, 3, 6};
constexpr std::int64_t pool_channels = 512;

std::string numbered(const char* name, std::size_t i, const char* ending) {
  return fmt::format("{}.{}{}", name, i, ending);
}

Var resized_to(nn::Context c, const Var& x, const Var& like) {
  return nn::resize_bilinear(c, x, like->value.dim(2), like->value.dim(3));
}

// The parts of decoders, registered in the order of the forward: a classifier comes behind what
// stands in front of it.
const ConvLayer* add_head(ConvNet& net, const std::string& conv, const Feature& in,
                          std::int64_t channels) {
  return net.add(conv + ".0", conv + ".1", in, channels, ops::Conv::same(3));
}
const ConvLayer* add_classifier(ConvNet& net, const std::string& name, const Feature& in,
                                std::int64_t classes) {
  return net.add(name, "", in, classes, ops::Conv::same(1), true);
}
const ConvLayer* add_aux_head(ConvNet& net, const std::vector<Feature>& maps) {
  WEFT_ASSERT(maps.size() > 1);
  net.auxiliary = true;
  const ConvLayer* conv =
      add_head(net, "cbr_deepsup", maps[maps.size() - 2], maps.back().channels / 4);
  net.auxiliary = false;
  return conv;
}
const ConvLayer* add_aux_classifier(ConvNet& net, const Feature& in, std::int64_t classes) {
  net.auxiliary = true;
  const ConvLayer* conv = add_classifier(net, "conv_last_deepsup", in, classes);
  net.auxiliary = false;
  return conv;
}

// c1, c1_deepsup.
class C1Decoder : public SegmentationDecoder {
 public:
  C1Decoder(ConvNet& net, const std::vector<Feature>& maps, std::int64_t classes, bool deepsup) {
    head_.conv = add_head(net, "cbr", maps.back(), maps.back().channels / 4);
    if (deepsup) aux_ = Head{add_aux_head(net, maps)};
    head_.classifier = add_classifier(net, "conv_last", head_.conv->out, classes);
    if (aux_) aux_->classifier = add_aux_classifier(net, aux_->conv->out, classes);
  }

  SegmentationLogits forward(nn::Context c, const std::vector<Var>& maps, nn::BatchNormGroup& group,
                             const SegmentationDropout&, bool want_aux) const override {
    std::vector<ConvNormCall> calls{{maps.back(), head_.conv}};
    if (want_aux && aux_) calls.push_back({maps[maps.size() - 2], aux_->conv});
    const std::vector<Var> x = conv_norms(c, std::move(calls), group);
    SegmentationLogits out;
    out.main = head_.classify(c, x[0], Tensor());
    if (x.size() > 1) out.aux = aux_->classify(c, x[1], Tensor());
    return out;
  }
};

// ppm, ppm_deepsup: the last map beside its means over 1, 4, 9 and 36 parts of the image.
class PpmDecoder : public SegmentationDecoder {
 public:
  PpmDecoder(ConvNet& net, const std::vector<Feature>& maps, std::int64_t classes, bool deepsup) {
    drops_ = true;
    const Feature top = maps.back();
    for (std::size_t i = 0; i < std::size(pool_sizes); ++i)
      branches_.push_back(net.add(numbered("ppm", i, ".1"), numbered("ppm", i, ".2"),
                                  {top.channels, top.rate, pool_sizes[i]}, pool_channels,
                                  ops::Conv::same(1)));
    if (deepsup) aux_ = Head{add_aux_head(net, maps)};
    const std::int64_t joined = top.channels + std::ssize(pool_sizes) * pool_channels;
    head_.conv = add_head(net, "conv_last", {joined, top.rate}, 512);
    head_.classifier = add_classifier(net, "conv_last.4", head_.conv->out, classes);
    if (aux_) aux_->classifier = add_aux_classifier(net, aux_->conv->out, classes);
  }

  SegmentationLogits forward(nn::Context c, const std::vector<Var>& maps, nn::BatchNormGroup& group,
                             const SegmentationDropout& dropout, bool want_aux) const override {
    const Var& top = maps.back();
    std::vector<ConvNormCall> calls;
    for (std::size_t i = 0; i < branches_.size(); ++i)
      calls.push_back({nn::adaptive_average_pool(c, top, pool_sizes[i]), branches_[i]});
    if (want_aux && aux_) calls.push_back({maps[maps.size() - 2], aux_->conv});
    std::vector<Var> levels = conv_norms(c, std::move(calls), group);
    Var aux;
    if (levels.size() > branches_.size()) aux = levels.back(), levels.pop_back();
    const ConvLayer& last = *head_.conv;
    const Var y = nn::batch_norm(c, nn::pyramid_conv(c, top, levels, last.conv), last.norm, group,
                                 Activation::relu);
    SegmentationLogits out;
    out.main = head_.classify(c, y, dropout.main);
    if (aux) out.aux = aux_->classify(c, aux, dropout.aux);
    return out;
  }

 private:
  std::vector<const ConvLayer*> branches_;
};

// upernet, upernet_lite: a feature pyramid on top of the pooled last map.
class UperNetDecoder : public SegmentationDecoder {
 public:
  UperNetDecoder(ConvNet& net, const std::vector<Feature>& maps, std::int64_t classes,
                 std::int64_t channels);
  SegmentationLogits forward(nn::Context c, const std::vector<Var>& maps, nn::BatchNormGroup& group,
                             const SegmentationDropout&, bool) const override;

 private:
  std::vector<const ConvLayer*> branches_, lateral_, smooth_;
  const ConvLayer* top_;
};

UperNetDecoder::UperNetDecoder(ConvNet& net, const std::vector<Feature>& maps, std::int64_t classes,
                               std::int64_t channels) {
  const Feature top = maps.back();
  const ops::Conv point = ops::Conv::same(1), square = ops::Conv::same(3);
  for (std::size_t i = 0; i < std::size(pool_sizes); ++i)
    branches_.push_back(net.add(numbered("ppm_conv", i, ".0"), numbered("ppm_conv", i, ".1"), top,
                                pool_channels, point));
  for (std::size_t i = 0; i + 1 < maps.size(); ++i)
    lateral_.push_back(net.add(numbered("fpn_in", i, ".0"), numbered("fpn_in", i, ".1"), maps[i],
                               channels, point));
  const std::int64_t joined = top.channels + std::ssize(pool_sizes) * pool_channels;
  top_ = net.add("ppm_last_conv.0", "ppm_last_conv.1", {joined, top.rate}, channels, square);
  for (std::size_t i = 0; i < lateral_.size(); ++i)
    smooth_.push_back(net.add(numbered("fpn_out", i, ".0.0"), numbered("fpn_out", i, ".0.1"),
                              lateral_[i]->out, channels, square));
  head_.conv =
      add_head(net, "conv_last.0",
               {static_cast<std::int64_t>(maps.size()) * channels, maps.front().rate}, channels);
  head_.classifier = add_classifier(net, "conv_last.1", head_.conv->out, classes);
}

SegmentationLogits UperNetDecoder::forward(nn::Context c, const std::vector<Var>& maps,
                                           nn::BatchNormGroup& group, const SegmentationDropout&,
                                           bool) const {
  const Var& top = maps.back();
  std::vector<nn::BatchNormCall> norms;
  // The original resizes the pooled map and then convolves. A 1x1 convolution without bias and a
  // bilinear resize commute, so here the few pooled pixels are convolved and fewer channels
  // resized.
  for (std::size_t i = 0; i < branches_.size(); ++i) {
    const Var pooled = nn::adaptive_average_pool(c, top, pool_sizes[i]);
    norms.push_back({resized_to(c, convolve(c, pooled, *branches_[i]), top), &branches_[i]->norm,
                     Activation::relu});
  }
  for (std::size_t i = 0; i < lateral_.size(); ++i)
    norms.push_back({convolve(c, maps[i], *lateral_[i]), &lateral_[i]->norm, Activation::relu});
  const std::vector<Var> parts = nn::batch_norms(c, std::exchange(norms, {}), group);
  const auto branches_end = parts.begin() + std::ssize(branches_);
  std::vector<Var> joined{top};
  joined.insert(joined.end(), parts.begin(), branches_end);
  Var f =
      conv_norm(c, nn::join_channels(c, std::exchange(joined, {})), *top_, group, Activation::relu);

  // From the coarsest to the finest; what leaves the pyramid is smoothed, what goes down is not.
  std::vector<Var> levels(lateral_.size() + 1);
  levels.back() = f;
  std::vector<ConvNormCall> calls(lateral_.size());
  for (std::size_t i = lateral_.size(); i-- > 0;) {
    const Var lateral = branches_end[static_cast<std::ptrdiff_t>(i)];
    f = nn::sum_terms(c, {lateral, f});
    calls[i] = {f, smooth_[i]};
  }
  const std::vector<Var> smoothed = conv_norms(c, std::move(calls), group);
  for (std::size_t i = 0; i < smoothed.size(); ++i) levels[i] = smoothed[i];
  for (std::size_t i = 1; i < levels.size(); ++i) levels[i] = resized_to(c, levels[i], levels[0]);
  const Var y = conv_norm(c, nn::join_channels(c, std::exchange(levels, {})), *head_.conv, group,
                          Activation::relu);
  return {head_.classify(c, y, Tensor()), nullptr};
}

}  // namespace

std::unique_ptr<FeatureNet> make_encoder(ConvNet& net, const std::string& name) {
  if (name == "mobilenetv2dilated") return std::make_unique<MobileNet>(net);
  if (name == "hrnetv2") {
    net.start = ConvStart::uniform;
    net.momentum = 0.1f;
    return std::make_unique<HrNet>(net);
  }
  ResNetShape shape;
  if (name.ends_with("dilated")) shape.output_stride = 8;
  if (name.starts_with("resnet18")) {
    shape.blocks = {2, 2, 2, 2};
    shape.bottleneck = false;
    shape.expansion = 1;
  }
  if (name.find("101") != std::string::npos) shape.blocks = {3, 4, 23, 3};
  if (name == "resnext101") {
    net.start = ConvStart::fan_out_of_group;
    shape.planes = 128;
    shape.expansion = 2;
    shape.groups = 32;
  }
  return std::make_unique<ResNet>(net, shape);
}

Var SegmentationDecoder::Head::classify(nn::Context c, const Var& x, const Tensor& dropout) const {
  return convolve(c, nn::scale_channels(c, x, dropout), *classifier);
}

std::unique_ptr<SegmentationDecoder> make_decoder(ConvNet& net, const SegmentationDeck& deck,
                                                  const std::vector<Feature>& maps) {
  const bool deepsup = deck.decoder.ends_with("_deepsup");
  const std::int64_t classes = deck.num_classes;
  if (deck.decoder.starts_with("c1"))
    return std::make_unique<C1Decoder>(net, maps, classes, deepsup);
  if (deck.decoder.starts_with("ppm"))
    return std::make_unique<PpmDecoder>(net, maps, classes, deepsup);
  return std::make_unique<UperNetDecoder>(net, maps, classes,
                                          deck.decoder == "upernet" ? 512 : 256);
}

}  // namespace weft
