#include "models/segmentation/segmentation.h"

#include <algorithm>
#include <array>
#include <utility>

#include "core/error.h"

namespace weft {
Segmentation::Segmentation(const SegmentationDeck& deck)
    : deck_(deck), params_(std::make_unique<ParameterTable>()) {
  WEFT_ASSERT(segmentation_misfit(deck.encoder, deck.decoder).what.empty());  // the deck's check
  encoder_layers_ = std::make_unique<ConvNet>(*params_, "encoder.");
  encoder_layers_->start = ConvStart::fan_out;
  encoder_layers_->shared_statistics = true;
  encoder_layers_->matrix_group = encoder_matrices;
  encoder_layers_->vector_group = encoder_vectors;
  encoder_ = make_encoder(*encoder_layers_, deck.encoder);
  decoder_layers_ = std::make_unique<ConvNet>(*params_, "decoder.");
  decoder_layers_->start = ConvStart::fan_in;
  decoder_layers_->shared_statistics = true;
  decoder_layers_->beta = 1e-4f;
  decoder_layers_->matrix_group = decoder_matrices;
  decoder_layers_->vector_group = decoder_vectors;
  decoder_ = make_decoder(*decoder_layers_, deck, encoder_->features());
}

Segmentation::Logits Segmentation::forward(nn::Context c, const Var& image,
                                           nn::BatchNormGroup& group, const Dropout& dropout,
                                           bool want_aux, std::int64_t recomputed) {
  WEFT_CHECK(!want_aux || !has_aux() || stride() == 8, Exit::usage,
             "take a dilated encoder, or the decoder without _deepsup",
             "model.decoder = \"{}\" does not train with model.encoder = \"{}\": its second loss "
             "would be on a map of another size than the labels",
             deck_.decoder, deck_.encoder);
  const std::vector<Var> maps = encoder_->forward(c, image, group, recomputed);
  return decoder_->forward(c, maps, group, dropout, want_aux);
}

double Segmentation::flops(std::int64_t height, std::int64_t width, bool with_aux) const {
  return 2 * (encoder_layers_->multiply_adds(height, width, with_aux) +
              decoder_layers_->multiply_adds(height, width, with_aux));
}

namespace {

// What follows the feature maps in the encoders of ImageNet: ResNet's classifier, MobileNetV2's
// last convolution and classifier, HRNet's head.
constexpr std::array imagenet_heads = {"fc.",           "classifier.",      "features.18.",
                                       "incre_modules", "downsamp_modules", "final_layer."};

}  // namespace

WeightNames segmentation_weight_names(const std::string& prefix) {
  WeightNames names;
  names.prefix = prefix;
  if (prefix == "encoder.")
    names.spare = [](const std::string& name) {
      return std::ranges::any_of(imagenet_heads,
                                 [&](const char* head) { return name.starts_with(head); });
    };
  names.may_lack = [](const std::string& name) {
    return name.ends_with("._tmp_running_mean") || name.ends_with("._tmp_running_var") ||
           name.ends_with("._running_iter");
  };
  return names;
}

std::string load_segmentation(const std::string& whole, const SegmentationDeck& deck,
                              ParameterTable& table, const ModelDeck* start) {
  const auto names_of = [start](const std::string& prefix) {
    const WeightNames names = segmentation_weight_names(prefix);
    return start != nullptr ? to_start_from(*start, names) : names;
  };
  WEFT_CHECK(whole.empty() || (deck.weights_encoder.empty() && deck.weights_decoder.empty()),
             Exit::usage, "take model.weights, or the other two",
             "model.weights = \"{}\" is given together with model.weights_encoder or "
             "model.weights_decoder",
             whole);
  if (!whole.empty()) return load_weights(whole, table, names_of(""));
  std::string read;
  for (const auto& [path, prefix] :
       {std::pair(deck.weights_encoder, "encoder."), std::pair(deck.weights_decoder, "decoder.")})
    if (!path.empty())
      read += (read.empty() ? "" : "; ") + load_weights(path, table, names_of(prefix));
  return read;
}

}  // namespace weft
