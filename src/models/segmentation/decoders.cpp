#include "models/segmentation/decoders.h"

#include <iterator>
#include <utility>

#include "core/error.h"
#include "nn/conv.h"
#include "nn/image_ops.h"

namespace weft {
namespace {

using nn::Activation;

constexpr int pool_sizes[] = {1, 2, 3, 6};
constexpr std::int64_t pool_channels = 512;

std::string numbered(const char* name, std::size_t i, const char* ending) {
  return fmt::format("{}.{}{}", name, i, ending);
}

std::optional<DecoderHead> aux_head(ConvNet& net, const std::vector<Feature>& maps, bool deepsup) {
  if (!deepsup) return std::nullopt;
  WEFT_ASSERT(maps.size() > 1);
  net.auxiliary = true;
  DecoderHead head(net, "cbr_deepsup", maps[maps.size() - 2], maps.back().channels / 4);
  net.auxiliary = false;
  return head;
}
void add_aux_classifier(ConvNet& net, std::optional<DecoderHead>& head, std::int64_t classes) {
  if (!head) return;
  net.auxiliary = true;
  head->add_classifier(net, "conv_last_deepsup", classes);
  net.auxiliary = false;
}

Var resized_to(nn::Context c, const Var& x, const Var& like) {
  return nn::resize_bilinear(c, x, like->value.dim(2), like->value.dim(3));
}

}  // namespace

DecoderHead::DecoderHead(ConvNet& net, const std::string& conv, const Feature& in,
                         std::int64_t channels)
    : conv_(net.add(conv + ".0", conv + ".1", in, channels, ops::Conv::same(3))) {}

void DecoderHead::add_classifier(ConvNet& net, const std::string& name, std::int64_t classes) {
  classifier_ = net.add_classifier(name, conv_.out, classes);
}

Var DecoderHead::classify(nn::Context c, const Var& x, const Tensor& dropout) const {
  return nn::conv(c, nn::scale_channels(c, x, dropout), classifier_, ops::Conv::same(1));
}

C1Decoder::C1Decoder(ConvNet& net, const std::vector<Feature>& maps, std::int64_t classes,
                     bool deepsup)
    : head_(net, "cbr", maps.back(), maps.back().channels / 4), aux_(aux_head(net, maps, deepsup)) {
  head_.add_classifier(net, "conv_last", classes);
  add_aux_classifier(net, aux_, classes);
}

SegmentationLogits C1Decoder::forward(nn::Context c, const std::vector<Var>& maps,
                                      nn::BatchNormGroup& group, const SegmentationDropout&,
                                      bool want_aux) const {
  std::vector<ConvNormCall> calls{{maps.back(), &head_.conv()}};
  if (want_aux && aux_) calls.push_back({maps[maps.size() - 2], &aux_->conv()});
  const std::vector<Var> x = conv_norms(c, calls, group);
  SegmentationLogits out;
  out.main = head_.classify(c, x[0], Tensor());
  if (x.size() > 1) out.aux = aux_->classify(c, x[1], Tensor());
  return out;
}

PpmDecoder::PpmDecoder(ConvNet& net, const std::vector<Feature>& maps, std::int64_t classes,
                       bool deepsup) {
  const Feature top = maps.back();
  for (std::size_t i = 0; i < std::size(pool_sizes); ++i)
    branches_.push_back(net.add(numbered("ppm", i, ".1"), numbered("ppm", i, ".2"),
                                {top.channels, top.rate, pool_sizes[i]}, pool_channels,
                                ops::Conv::same(1)));
  aux_ = aux_head(net, maps, deepsup);
  const std::int64_t joined = top.channels + std::ssize(pool_sizes) * pool_channels;
  head_.emplace(net, "conv_last", Feature{joined, top.rate}, 512);
  head_->add_classifier(net, "conv_last.4", classes);
  add_aux_classifier(net, aux_, classes);
}

SegmentationLogits PpmDecoder::forward(nn::Context c, const std::vector<Var>& maps,
                                       nn::BatchNormGroup& group,
                                       const SegmentationDropout& dropout, bool want_aux) const {
  const Var& top = maps.back();
  std::vector<ConvNormCall> calls;
  for (std::size_t i = 0; i < branches_.size(); ++i)
    calls.push_back({nn::adaptive_average_pool(c, top, pool_sizes[i]), &branches_[i]});
  if (want_aux && aux_) calls.push_back({maps[maps.size() - 2], &aux_->conv()});
  std::vector<Var> levels = conv_norms(c, calls, group);
  Var aux;
  if (levels.size() > branches_.size()) aux = levels.back(), levels.pop_back();
  const ConvNorm& last = head_->conv();
  const Var y = nn::batch_norm(c, nn::pyramid_conv(c, top, levels, last.conv), last.norm, group,
                               Activation::relu);
  SegmentationLogits out;
  out.main = head_->classify(c, y, dropout.main);
  if (aux) out.aux = aux_->classify(c, aux, dropout.aux);
  return out;
}

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
                              lateral_[i].out, channels, square));
  head_.emplace(net, "conv_last.0",
                Feature{static_cast<std::int64_t>(maps.size()) * channels, maps.front().rate},
                channels);
  head_->add_classifier(net, "conv_last.1", classes);
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
    norms.push_back({resized_to(c, convolve(c, pooled, branches_[i]), top), &branches_[i].norm,
                     Activation::relu});
  }
  for (std::size_t i = 0; i < lateral_.size(); ++i)
    norms.push_back({convolve(c, maps[i], lateral_[i]), &lateral_[i].norm, Activation::relu});
  const std::vector<Var> parts = nn::batch_norms(c, std::exchange(norms, {}), group);
  const auto branches_end = parts.begin() + std::ssize(branches_);
  std::vector<Var> joined{top};
  joined.insert(joined.end(), parts.begin(), branches_end);
  Var f =
      conv_norm(c, nn::join_channels(c, std::exchange(joined, {})), top_, group, Activation::relu);

  // From the coarsest to the finest; what leaves the pyramid is smoothed, what goes down is not.
  std::vector<Var> levels(lateral_.size() + 1);
  levels.back() = f;
  std::vector<ConvNormCall> calls(lateral_.size());
  for (std::size_t i = lateral_.size(); i-- > 0;) {
    const Var lateral = branches_end[static_cast<std::ptrdiff_t>(i)];
    f = nn::sum_terms(c, {lateral, f});
    calls[i] = {f, &smooth_[i]};
  }
  const std::vector<Var> smoothed = conv_norms(c, std::exchange(calls, {}), group);
  for (std::size_t i = 0; i < smoothed.size(); ++i) levels[i] = smoothed[i];
  for (std::size_t i = 1; i < levels.size(); ++i) levels[i] = resized_to(c, levels[i], levels[0]);
  const Var y = conv_norm(c, nn::join_channels(c, std::exchange(levels, {})), head_->conv(), group,
                          Activation::relu);
  return {head_->classify(c, y, Tensor()), nullptr};
}

}  // namespace weft
