#include "models/dbnet/dbnet.h"

#include <algorithm>
#include <array>

#include "config/deck_table.h"
#include "core/error.h"
#include "nn/image_ops.h"
#include "ops/pointwise.h"

namespace weft {
namespace {

constexpr std::int64_t lateral_channels = 256;
constexpr std::int64_t scale_channels = 64;  // of each of the four scales behind the pyramid

ResNetShape shape_of(const DbnetDeck& deck, bool deformable) {
  ResNetShape shape;
  shape.stem = {64};
  shape.deformable = deformable;
  if (deck.backbone == "resnet18") {
    shape.blocks = {2, 2, 2, 2};
    shape.bottleneck = false;
    shape.expansion = 1;
    WEFT_CHECK(!deformable, Exit::usage, "set model.deformable = \"off\", or another backbone",
               "model.backbone = \"resnet18\" has no deformable convolutions");
  }
  if (deck.backbone == "oclip_resnet50") {
    shape.stem = {32, 32, 64};
    shape.clip = true;
  }
  return shape;
}

}  // namespace

Dbnet::Dbnet(const DbnetDeck& deck, bool deformable) : params_(std::make_unique<ParameterTable>()) {
  const auto layers = [&](const char* prefix) {
    auto net = std::make_unique<ConvNet>(*params_, prefix);
    net->start = ConvStart::fan_out;
    net->momentum = 0.1f;
    return net;
  };
  backbone_layers_ = layers("backbone.");
  backbone_ = std::make_unique<ResNet>(*backbone_layers_, shape_of(deck, deformable));

  neck_layers_ = layers("neck.");
  ConvNet& net = *neck_layers_;
  std::vector<Feature> maps = backbone_->features();
  for (std::size_t i = 0; i < 4; ++i)
    lateral_[i] = net.add(fmt::format("lateral_convs.{}.conv", i), "", maps[i], lateral_channels,
                          ops::Conv::same(1));
  for (std::size_t i = 0; i < 4; ++i)
    smooth_[i] = net.add(fmt::format("smooth_convs.{}.conv", i), "", lateral_[i]->out,
                         scale_channels, ops::Conv::same(3));
  const Feature joined{4 * scale_channels, maps[0].rate};
  if (deck.asf) {
    ScaleFusion& f = fusion_.emplace();
    const auto add = [&](const char* name, const Feature& in, std::int64_t out, int k) {
      return net.add(fmt::format("asf_attn.{}.conv", name), "", in, out, ops::Conv::same(k));
    };
    f.conv = net.add("asf_conv.conv", "", joined, joined.channels, ops::Conv::same(3), true);
    const Feature mean{joined.channels, 0, 1}, pixel{1, joined.rate};
    f.channel_in = add("channel_wise.0", mean, joined.channels / 4, 1);
    f.channel_out = add("channel_wise.1", f.channel_in->out, joined.channels, 1);
    f.spatial_in = add("spatial_wise.0", pixel, 1, 3);
    f.spatial_out = add("spatial_wise.1", pixel, 1, 1);
    f.attention = add("attention_wise", joined, 4, 1);
  }

  head_layers_ = layers("det_head.");
  head_layers_->beta = 1e-4f;
  probability_ = add_head("binarize", joined);
  head_layers_->auxiliary = true;
  threshold_ = add_head("threshold", joined);
}

Dbnet::Head Dbnet::add_head(const std::string& name, const Feature& in) {
  ConvNet& net = *head_layers_;
  Head h;
  h.conv = net.add(name + ".0", name + ".1", in, scale_channels, ops::Conv::same(3));
  h.up = net.add_transposed(name + ".3", h.conv->out, scale_channels);
  h.up_norm = net.add_norm(name + ".4", scale_channels);
  h.out = net.add_transposed(name + ".6", {scale_channels, in.rate / 2}, 1);
  return h;
}

Var Dbnet::head(nn::Context c, const Head& h, const Var& x, nn::BatchNormGroup& group) const {
  Var y = conv_norm(c, x, *h.conv, group, nn::Activation::relu);
  y = nn::conv_transpose_2x2(c, y, h.up);
  y = nn::batch_norm(c, y, h.up_norm->norm, group, nn::Activation::relu);
  return nn::conv_transpose_2x2(c, y, h.out);
}

Var Dbnet::fuse_scales(nn::Context c, const Var& joined) const {
  const ScaleFusion& f = *fusion_;
  const Var a = convolve(c, joined, *f.conv);
  Var channels = nn::adaptive_average_pool(c, a, 1);
  channels = nn::leaky_relu(c, convolve(c, channels, *f.channel_in), 0);
  channels = nn::sigmoid(c, convolve(c, channels, *f.channel_out));
  const Var t = nn::add_outer(c, a, channels, nullptr);
  Var pixels = nn::leaky_relu(c, convolve(c, nn::channel_mean(c, t), *f.spatial_in), 0);
  pixels = nn::sigmoid(c, convolve(c, pixels, *f.spatial_out));
  const Var u = nn::add_outer(c, t, nullptr, pixels);
  return nn::scale_groups(c, joined, nn::sigmoid(c, convolve(c, u, *f.attention)));
}

Var Dbnet::neck(nn::Context c, std::vector<Var> maps) const {
  std::vector<Var> smooth(4);
  Var above;
  for (std::size_t i = 4; i-- > 0;) {
    Var level = convolve(c, std::exchange(maps[i], nullptr), *lateral_[i]);
    if (above) level = nn::add_upsampled(c, level, above);
    smooth[i] = convolve(c, level, *smooth_[i]);
    above = level;
  }
  above.reset();
  const Var joined = nn::join_upsampled(c, std::exchange(smooth, {}));
  return fusion_ ? fuse_scales(c, joined) : joined;
}

Dbnet::Maps Dbnet::forward(nn::Context c, const Var& image, nn::BatchNormGroup& group,
                           bool want_threshold, std::int64_t recomputed) const {
  WEFT_ASSERT(image->value.dim(2) % stride == 0 && image->value.dim(3) % stride == 0);
  const Var x = neck(c, backbone_->forward(c, image, group, recomputed));
  Maps maps;
  maps.probability = head(c, probability_, x, group);
  if (want_threshold) maps.threshold = head(c, threshold_, x, group);
  return maps;
}

void Dbnet::scale_conv2(float gain) {
  if (gain == 1) return;
  for (std::size_t l = 1; l < 4; ++l)
    for (const ResidualBlock& block : backbone_->layers()[l]) {
      if (block.convs[1]->offsets.weight != nullptr) continue;
      WEFT_CHECK(block.convs.size() == 3, Exit::usage, "set model.conv2_gain = 1",
                 "model.conv2_gain = {} is for a backbone of bottlenecks, such as "
                 "oclip_resnet50",
                 gain);
      scale_rows(*block.convs[1]->conv.weight, std::vector<double>(1, gain));
    }
}

double Dbnet::flops(std::int64_t height, std::int64_t width, bool with_threshold) const {
  double sum = 0;
  for (const auto* layers : {&backbone_layers_, &neck_layers_, &head_layers_})
    sum += (*layers)->multiply_adds(height, width, with_threshold);
  return 2 * sum;
}

bool has_offsets(const WeightFiles& files) {
  return files.find("backbone.layer2.0.conv2.conv_offset.weight") != nullptr;
}

ops::PixelScale dbnet_pixel_scale() {
  return {1.0f, {123.675f, 116.28f, 103.53f}, {58.395f, 57.12f, 57.375f}, false};
}

namespace {

// What stands behind the feature maps of a backbone: the classifier of ImageNet, oCLIP's pooling.
constexpr std::array backbone_heads = {"fc.", "attnpool."};

bool is_offset(const std::string& name) { return name.find(".conv_offset.") != std::string::npos; }

std::string load_backbone(const ModelDeck& model, const std::string& path, ParameterTable& table) {
  WeightNames names = to_start_from(model);
  names.prefix = "backbone.";
  names.spare = [](const std::string& name) {
    return std::ranges::any_of(backbone_heads,
                               [&](const char* head) { return name.starts_with(head); });
  };
  names.may_lack = is_offset;
  return load_weights(path, table, names);
}

}  // namespace

std::string load_dbnet(const ModelDeck& model, const DbnetDeck& deck, ParameterTable& table) {
  const std::string& whole = model.weights;
  WEFT_CHECK(whole.empty() || deck.weights_backbone.empty(), Exit::usage,
             "leave one of them empty: model.weights holds a backbone too",
             "model.weights = \"{}\" is given together with model.weights_backbone = \"{}\"", whole,
             deck.weights_backbone);
  if (!deck.weights_backbone.empty()) return load_backbone(model, deck.weights_backbone, table);
  if (whole.empty()) return "";
  const bool deformable =
      std::ranges::any_of(table.all(), [](const auto& p) { return is_offset(p->name); });
  WEFT_CHECK(deformable || !has_offsets(WeightFiles::open(whole)), Exit::usage,
             "set model.deformable = \"on\"",
             "{} has deformable convolutions (conv_offset), and model.deformable = \"{}\" trains "
             "without them",
             whole, deck.deformable);
  return load_weights(whole, table, to_start_from(model));
}

namespace {

void model_rows(Rows& r, DbnetDeck& d) {
  r.text("backbone", d.backbone,
         "Text detector: network that makes feature maps of a picture. oclip_resnet50 has three "
         "convolutions in front and pools by averages.",
         {"oclip_resnet50", "resnet50", "resnet18"});
  r.flag("asf", d.asf,
         "Text detector: adaptive scale fusion behind the feature pyramid; DBNet++ has it, DBNet "
         "has not.");
  r.number("conv2_gain", d.conv2_gain, 0, 100,
           "Text detector: factor of each 3x3 convolution of layer2 to layer4 when pictures are "
           "scored. 1 is the published network; Open-Sora 1.2 computes 0.5.");
  r.text("deformable", d.deformable,
         "Text detector: whether these convolutions are deformable (DCNv2); auto: if the weights "
         "have conv_offset. A training takes auto as off.",
         {"auto", "on", "off"});
  r.path("weights_backbone", d.weights_backbone,
         "Text detector: safetensors file of the backbone alone that training starts from, of "
         "ImageNet or oCLIP, without \"backbone.\" in front of its names.");
}

void postprocess_rows(Rows& r, PostprocessDeck& d) {
  r.number("mask_threshold", d.mask_threshold, 0, 1,
           "Pixels whose probability of text is above this make regions.");
  r.number("min_text_score", d.min_text_score, 0, 1,
           "Regions whose mean probability is below this are left out.");
  r.number("min_text_width", d.min_text_width, 0, 1e6,
           "Pixels that the shorter side of a region's box has at least.");
  r.number("unclip_ratio", d.unclip_ratio, 0, 100,
           "Regions grow by this times area / perimeter: the network marks shrunk ones.");
  r.number("epsilon_ratio", d.epsilon_ratio, 0, 1,
           "Outlines are simplified within this share of their length. DBNet++ takes 0.002, DBNet "
           "0.01.");
  r.number("max_candidates", d.max_candidates, 0, 1e6,
           "Maximum number of outlines examined in a picture (plus one), from the bottom up.");
}

}  // namespace

std::vector<DeckTable> dbnet_tables() {
  DeckTable model = deck_table("model", model_rows);
  model.next = "model";
  model.fixed = true;
  return {model, deck_table("postprocess", postprocess_rows), dbnet_train_table()};
}

namespace {

void rows(Rows& r, DbnetTrainDeck& d) {
  r.number("lr_detector", d.lr_detector, 0, 1e3, "Text detector: learning rate.");
}

}  // namespace

DeckTable dbnet_train_table() {
  DeckTable t = deck_table("train", rows);
  t.next = "parallel";
  t.fixed = true;
  return t;
}

}  // namespace weft
