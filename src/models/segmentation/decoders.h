// Decoders of semantic segmentation (docs/models/segmentation.md, Decoders): logits of an encoder's
// feature maps.
#pragma once

#include <optional>
#include <variant>

#include "models/resnet/conv_net.h"

namespace weft {

// Factors of channels in front of the classifiers, f32 [N,C]: 0 or 1 / (1 - p). Undefined: 1.
struct SegmentationDropout {
  Tensor main, aux;
};
// [N,1,h,w,classes]; aux: of the deep supervision, where there is one and it is wanted.
struct SegmentationLogits {
  Var main, aux;
};

// A 3x3 convolution and a classifier, and the same once more for the deep supervision, which looks
// at the last but one map.
class DecoderHead {
 public:
  DecoderHead(ConvNet& net, const std::string& conv, const Feature& in, std::int64_t channels);
  // Called when what stands in front of the classifier is registered, for the order of the forward.
  void add_classifier(ConvNet& net, const std::string& name, std::int64_t classes);

  const ConvNorm& conv() const { return conv_; }
  std::int64_t channels() const { return conv_.out.channels; }
  Var classify(nn::Context c, const Var& x, const Tensor& dropout) const;

 private:
  ConvNorm conv_;
  nn::ConvWeights classifier_;
};

// c1, c1_deepsup.
class C1Decoder {
 public:
  C1Decoder(ConvNet& net, const std::vector<Feature>& maps, std::int64_t classes, bool deepsup);
  SegmentationLogits forward(nn::Context c, const std::vector<Var>& maps, nn::BatchNormGroup& group,
                             const SegmentationDropout& dropout, bool want_aux) const;
  std::int64_t dropout_channels() const { return 0; }
  std::int64_t aux_dropout_channels() const { return 0; }
  int rate() const { return head_.conv().out.rate; }

 private:
  DecoderHead head_;
  std::optional<DecoderHead> aux_;
};

// ppm, ppm_deepsup: the last map beside its means over 1, 4, 9 and 36 parts of the image.
class PpmDecoder {
 public:
  PpmDecoder(ConvNet& net, const std::vector<Feature>& maps, std::int64_t classes, bool deepsup);
  SegmentationLogits forward(nn::Context c, const std::vector<Var>& maps, nn::BatchNormGroup& group,
                             const SegmentationDropout& dropout, bool want_aux) const;
  std::int64_t dropout_channels() const { return head_->channels(); }
  std::int64_t aux_dropout_channels() const { return aux_ ? aux_->channels() : 0; }
  int rate() const { return head_->conv().out.rate; }

 private:
  std::vector<ConvNorm> branches_;
  std::optional<DecoderHead> head_, aux_;
};

// upernet, upernet_lite: a feature pyramid on top of the pooled last map.
class UperNetDecoder {
 public:
  UperNetDecoder(ConvNet& net, const std::vector<Feature>& maps, std::int64_t classes,
                 std::int64_t channels);
  SegmentationLogits forward(nn::Context c, const std::vector<Var>& maps, nn::BatchNormGroup& group,
                             const SegmentationDropout& dropout, bool want_aux) const;
  std::int64_t dropout_channels() const { return 0; }
  std::int64_t aux_dropout_channels() const { return 0; }
  int rate() const { return head_->conv().out.rate; }

 private:
  std::vector<ConvNorm> branches_, lateral_, smooth_;
  ConvNorm top_;
  std::optional<DecoderHead> head_;
};

using SegmentationDecoder = std::variant<C1Decoder, PpmDecoder, UperNetDecoder>;

}  // namespace weft
