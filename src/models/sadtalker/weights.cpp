#include "models/sadtalker/weights.h"

#include <algorithm>

#include "models/resnet/folded_net.h"

namespace weft {
namespace {

bool begins_with_any(const std::string& name, const std::vector<std::string>& prefixes) {
  return std::ranges::any_of(prefixes, [&](const auto& p) { return name.starts_with(p); });
}

}  // namespace

WeightNames sadtalker_weight_names(std::vector<std::string> prefixes,
                                   std::vector<std::string> unused) {
  WeightNames names;
  names.section = "sadtalker";
  names.spare = [prefixes = std::move(prefixes),
                 unused = std::move(unused)](const std::string& name) {
    return counts_batches(name) || !begins_with_any(name, prefixes) ||
           begins_with_any(name, unused);
  };
  return names;
}

WeightNames mapping_weight_names() {
  const std::string prefix = "mapping.";
  WeightNames names = sadtalker_weight_names({prefix});
  names.others = [prefix](const std::string& name) {
    return std::vector<std::string>{name.substr(prefix.size())};
  };
  return names;
}

}  // namespace weft
