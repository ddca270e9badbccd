#include "models/dbnet/weights.h"

#include <algorithm>
#include <array>

#include "core/error.h"

namespace weft {
namespace {

// What stands behind the feature maps of a backbone: the classifier of ImageNet, oCLIP's pooling.
constexpr std::array backbone_heads = {"fc.", "attnpool."};

bool is_bookkeeping(const std::string& name) {
  return name.ends_with("._tmp_running_mean") || name.ends_with("._tmp_running_var") ||
         name.ends_with("._running_iter");
}

bool is_offset(const std::string& name) { return name.find(".conv_offset.") != std::string::npos; }

}  // namespace

WeightNames dbnet_weight_names(const std::string& prefix) {
  WeightNames names;
  names.prefix = prefix;
  names.spare = [backbone = !prefix.empty()](const std::string& name) {
    return name.ends_with(".num_batches_tracked") ||
           (backbone && std::ranges::any_of(backbone_heads, [&](const char* head) {
              return name.starts_with(head);
            }));
  };
  names.may_lack = is_bookkeeping;
  return names;
}

bool is_unreleased(const Parameter& p) { return is_bookkeeping(p.name); }

void load_dbnet(const std::string& whole, const DbnetDeck& deck, ParameterTable& table) {
  WEFT_CHECK(whole.empty() || deck.weights_backbone.empty(), Exit::usage,
             "leave one of them empty: model.weights holds a backbone too",
             "model.weights = \"{}\" is given beside model.weights_backbone = \"{}\"", whole,
             deck.weights_backbone);
  if (!deck.weights_backbone.empty()) {
    WeightNames names = dbnet_weight_names("backbone.");
    // ImageNet's networks have none; offsets that start at zero sample at the taps themselves.
    names.may_lack = [](const std::string& name) { return is_bookkeeping(name) || is_offset(name); };
    load_weights(deck.weights_backbone, table, names);
  }
  if (whole.empty()) return;
  const bool wanted =
      std::ranges::any_of(table.all(), [](const auto& p) { return is_offset(p->name); });
  const WeightFiles files = WeightFiles::open(whole);
  const bool there = std::ranges::any_of(
      files.tensors(), [](const auto& t) { return is_offset(t.entry.name); });
  WEFT_CHECK(wanted || !there, Exit::usage, "set model.deformable = \"on\"",
             "{} has deformable convolutions (conv_offset), and model.deformable = \"{}\" trains "
             "without them",
             whole, deck.deformable);
  load_weights(whole, table, dbnet_weight_names());
}

}  // namespace weft
