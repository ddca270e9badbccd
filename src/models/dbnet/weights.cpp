#include "models/dbnet/weights.h"

#include <algorithm>
#include <array>

#include "core/error.h"

namespace weft {
namespace {

// What stands behind the feature maps of a backbone: the classifier of ImageNet, oCLIP's pooling.
constexpr std::array backbone_heads = {"fc.", "attnpool."};

bool is_offset(const std::string& name) { return name.find(".conv_offset.") != std::string::npos; }

std::string load_backbone(const std::string& path, ParameterTable& table) {
  WeightNames names = dbnet_weight_names();
  names.prefix = "backbone.";
  names.spare = [usual = names.spare](const std::string& name) {
    return usual(name) || std::ranges::any_of(backbone_heads, [&](const char* head) {
             return name.starts_with(head);
           });
  };
  names.may_lack = is_offset;
  return load_weights(path, table, names);
}

}  // namespace

std::string load_dbnet(const std::string& whole, const DbnetDeck& deck, ParameterTable& table) {
  WEFT_CHECK(whole.empty() || deck.weights_backbone.empty(), Exit::usage,
             "leave one of them empty: model.weights holds a backbone too",
             "model.weights = \"{}\" is given beside model.weights_backbone = \"{}\"", whole,
             deck.weights_backbone);
  if (!deck.weights_backbone.empty()) return load_backbone(deck.weights_backbone, table);
  if (whole.empty()) return "";
  const bool deformable =
      std::ranges::any_of(table.all(), [](const auto& p) { return is_offset(p->name); });
  WEFT_CHECK(deformable || !has_offsets(WeightFiles::open(whole)), Exit::usage,
             "set model.deformable = \"on\"",
             "{} has deformable convolutions (conv_offset), and model.deformable = \"{}\" trains "
             "without them",
             whole, deck.deformable);
  return load_weights(whole, table, dbnet_weight_names());
}

}  // namespace weft
