#include "nn/optimizer_state.h"

#include "ops/pointwise.h"

namespace weft {

OptimizerState::OptimizerState(ParameterTable& table, bool sharded, int rank, int ranks,
                               bool squares)
    : table_(table), sharded_(sharded) {
  offsets_.push_back(0);
  std::int64_t low = 0;  // elements of bf16_only buckets
  for (const ParameterTable::Bucket& b : table.buckets()) {
    parts_.push_back(sharded ? part_of(b.begin, b.end, rank, ranks) : Part{b.begin, b.end});
    offsets_.push_back(offsets_.back() + parts_.back().size());
    if (b.bf16_only) low = offsets_.back();
  }
  const Shape shape{offsets_.back()};
  exp_avg_ = Tensor::persistent(shape, DType::f32);
  if (squares) exp_avg_sq_ = Tensor::persistent(shape, DType::f32);
  ema_ = Tensor::persistent(shape, DType::f32);
  for (int b = 0; b < static_cast<int>(parts_.size()); ++b) {
    Tensor to = ema(b);
    ops::convert(master(b), to);
  }
  if (!sharded || !table.working().defined() || low == 0) return;
  // The EMA still equals the masters and is already cut into this rank's parts: copy it.
  Tensor moved = Tensor::persistent({low}, DType::f32);
  ops::convert(ema_.slice(0, low), moved);
  master_ = moved;
  table.drop_bf16_only_values();
}

Tensor OptimizerState::own(const Tensor& array, int bucket) const {
  const auto b = static_cast<std::size_t>(bucket);
  return array.slice(offsets_[b], offsets_[b + 1]);
}

Tensor OptimizerState::master(int bucket) const {
  const Part& p = part(bucket);
  if (master_.defined() && table_.buckets()[static_cast<std::size_t>(bucket)].bf16_only)
    return own(master_, bucket);
  const std::int64_t first = table_.values_begin();
  return table_.values().slice(p.begin - first, p.end - first);
}

Tensor OptimizerState::gradient(int bucket) const {
  return table_.grads().slice(part(bucket).begin, part(bucket).end);
}

Tensor OptimizerState::working(int bucket) const {
  if (!table_.working().defined()) return {};
  return table_.working().slice(part(bucket).begin, part(bucket).end);
}

std::size_t OptimizerState::bytes() const {
  return exp_avg_.bytes() + (has_squares() ? exp_avg_sq_.bytes() : 0) + ema_.bytes() +
         (master_.defined() ? master_.bytes() : 0);
}

}  // namespace weft
