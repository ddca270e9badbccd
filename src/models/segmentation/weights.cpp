#include "models/segmentation/weights.h"

#include <algorithm>
#include <array>
#include <utility>

#include "core/error.h"

namespace weft {
namespace {

// What follows the feature maps in the encoders of ImageNet: ResNet's classifier, MobileNetV2's
// last convolution and classifier, HRNet's head.
constexpr std::array imagenet_heads = {"fc.",           "classifier.",      "features.18.",
                                       "incre_modules", "downsamp_modules", "final_layer."};

bool is_spare(const std::string& name, bool encoder) {
  if (name.ends_with(".num_batches_tracked")) return true;
  return encoder && std::ranges::any_of(imagenet_heads,
                                        [&](const char* head) { return name.starts_with(head); });
}

}  // namespace

WeightNames segmentation_weight_names(const std::string& prefix) {
  WeightNames names;
  names.prefix = prefix;
  names.spare = [encoder = prefix == "encoder."](const std::string& name) {
    return is_spare(name, encoder);
  };
  names.may_lack = [](const std::string& name) {
    return name.ends_with("._tmp_running_mean") || name.ends_with("._tmp_running_var") ||
           name.ends_with("._running_iter");
  };
  return names;
}

std::string load_segmentation(const std::string& whole, const SegmentationDeck& deck,
                              ParameterTable& table) {
  WEFT_CHECK(whole.empty() || (deck.weights_encoder.empty() && deck.weights_decoder.empty()),
             Exit::usage, "take model.weights, or the other two",
             "model.weights = \"{}\" is given beside model.weights_encoder or "
             "model.weights_decoder",
             whole);
  if (!whole.empty()) return load_weights(whole, table, segmentation_weight_names());
  std::string read;
  for (const auto& [path, prefix] :
       {std::pair(deck.weights_encoder, "encoder."), std::pair(deck.weights_decoder, "decoder.")})
    if (!path.empty())
      read +=
          (read.empty() ? "" : "; ") + load_weights(path, table, segmentation_weight_names(prefix));
  return read;
}

}  // namespace weft
