// The networks of semantic segmentation (docs/models/segmentation.md, Encoders, Decoders): encoders
// make feature maps of an image, decoders make logits of these.
#pragma once

#include <memory>
#include <optional>

#include "models/resnet/resnet.h"
#include "models/segmentation/options.h"

namespace weft {

// The encoder of that name, one of segmentation_encoders(): ResNet and ResNeXt, MobileNetV2, HRNet.
// Adds its layers to `net`, whose start and momentum become what the original has.
std::unique_ptr<FeatureNet> make_encoder(ConvNet& net, const std::string& name);

// Factors of channels in front of the classifiers, f32 [N,C]: 0 or 1 / (1 - p). Undefined: 1.
struct SegmentationDropout {
  Tensor main, aux;
};
// [N,1,h,w,classes]; aux: of the deep supervision, where there is one and it is wanted.
struct SegmentationLogits {
  Var main, aux;
};

class SegmentationDecoder {
 public:
  virtual ~SegmentationDecoder() = default;
  virtual SegmentationLogits forward(nn::Context c, const std::vector<Var>& maps,
                                     nn::BatchNormGroup& group, const SegmentationDropout& dropout,
                                     bool want_aux) const = 0;
  // Channels in front of the classifiers that dropout may leave out; 0: none there.
  std::int64_t dropout_channels() const { return drops_ ? head_.conv->out.channels : 0; }
  std::int64_t aux_dropout_channels() const {
    return drops_ && aux_ ? aux_->conv->out.channels : 0;
  }
  // The image's size over that of the logits.
  int rate() const { return head_.conv->out.rate; }

 protected:
  // A 3x3 convolution and a classifier; and the same once more for the deep supervision, which
  // looks at the last but one map.
  struct Head {
    const ConvLayer *conv = nullptr, *classifier = nullptr;
    Var classify(nn::Context c, const Var& x, const Tensor& dropout) const;
  };
  Head head_;
  std::optional<Head> aux_;
  bool drops_ = false;
};
// The deck's decoder of an encoder's maps.
std::unique_ptr<SegmentationDecoder> make_decoder(ConvNet& net, const SegmentationDeck& deck,
                                                  const std::vector<Feature>& maps);

}  // namespace weft
