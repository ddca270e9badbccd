#include "train/layer_norms.h"

#include <algorithm>
#include <cctype>
#include <map>

#include "ops/optimizer.h"
#include "ops/pointwise.h"

namespace weft {
namespace {

std::vector<std::string> layers_of(const ParameterTable& table) {
  std::vector<std::string> layers;
  for (const auto& p : table.all()) {
    std::string layer = layer_of(p->name);
    if (p->trainable && std::find(layers.begin(), layers.end(), layer) == layers.end())
      layers.push_back(std::move(layer));
  }
  return layers;
}

}  // namespace

std::string layer_of(std::string_view parameter) {
  for (std::size_t begin = 0; begin < parameter.size();) {
    const std::size_t end = std::min(parameter.find('.', begin), parameter.size());
    const std::string_view part = parameter.substr(begin, end - begin);
    if (!part.empty() && std::ranges::all_of(part, [](unsigned char c) { return std::isdigit(c); }))
      return std::string(parameter.substr(0, end));
    begin = end + 1;
  }
  return std::string(parameter.substr(0, parameter.rfind('.')));
}

LayerNorms::LayerNorms(const ParameterTable& table, const OptimizerState& state, Communicator& comm)
    : state_(state),
      comm_(comm),
      layers_(layers_of(table)),
      squares_(Tensor::persistent({std::max<std::int64_t>(1, std::ssize(layers_))}, DType::f64)),
      host_(squares_.numel()) {
  std::map<std::int64_t, const Parameter*> by_offset;  // buckets lie one behind the other
  for (const auto& p : table.all())
    if (p->trainable) by_offset[p->offset] = p.get();
  for (const auto& [offset, p] : by_offset) {
    const std::string name = layer_of(p->name);
    const auto layer = std::find(layers_.begin(), layers_.end(), name) - layers_.begin();
    const Part mine = state.part(p->bucket);
    const std::int64_t begin = std::max(offset, mine.begin) - mine.begin;
    const std::int64_t end = std::min(offset + p->shape.numel(), mine.end) - mine.begin;
    if (begin >= end) continue;
    // The padding between parameters is zero, so that one call may go over it.
    if (!stretches_.empty() && stretches_.back().bucket == p->bucket &&
        stretches_.back().layer == layer)
      stretches_.back().end = end;
    else
      stretches_.push_back({p->bucket, begin, end, layer});
  }
}

Communicator::Ticket LayerNorms::send() {
  ops::fill_zero(squares_);
  for (const Stretch& s : stretches_) {
    Tensor sum = squares_.slice(s.layer, s.layer + 1);
    ops::sum_of_squares(state_.gradient(s.bucket).slice(s.begin, s.end), sum, true);
  }
  return state_.sharded() ? comm_.all_reduce_sum(squares_) : 0;
}

}  // namespace weft
