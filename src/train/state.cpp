#include "train/state.h"

#include <algorithm>

#include "core/error.h"
#include "core/version.h"

namespace weft {
namespace {

const TensorRange& range_of(const Checkpoint& c, const Parameter& p) {
  for (const TensorRange& r : c.info().tensors)
    if (r.name == p.name) {
      const Shape shape{std::span<const std::int64_t>(r.shape)};
      WEFT_CHECK(shape == p.shape, Exit::checkpoint,
                 "continue with the [model] table that the run was started with, or set "
                 "run.resume = false and another run.dir",
                 "{}: tensor {} has shape {}, the deck's model wants {}", c.dir().string(), p.name,
                 shape.str(), p.shape.str());
      return r;
    }
  throw Error(Exit::checkpoint, fmt::format("{} has no tensor {}", c.dir().string(), p.name),
              "continue with the [model] table that the run was started with, or set run.resume = "
              "false and another run.dir",
              __FILE__, __LINE__);
}

// Elements of `array` from `offset` on, as many as `to` has, which may live on a GPU.
void read_into(const Checkpoint& c, const std::string& array, std::int64_t offset, Tensor& to) {
  if (to.device() == DeviceKind::cpu) {
    c.read(array, offset, to.span<float>());
    return;
  }
  std::vector<float> values(static_cast<std::size_t>(to.numel()));
  c.read(array, offset, values);
  to.set(std::span<const float>(values));
}

// Reads `array` of the checkpoint into what `part_of_bucket(b)` holds of each bucket: elements `owned(b)` of the flat space.
template <class Owned, class Target>
void read_trainable(const Checkpoint& c, const std::string& array, ParameterTable& table,
                    Owned&& owned, Target&& target) {
  for (const auto& p : table.all()) {
    if (!p->trainable) continue;
    const Part part = owned(p->bucket);
    const std::int64_t first = std::max(p->offset, part.begin);
    const std::int64_t last = std::min(p->offset + p->shape.numel(), part.end);
    const TensorRange& range = range_of(c, *p);
    if (first >= last) continue;
    Tensor to = target(p->bucket).slice(first - part.begin, last - part.begin);
    read_into(c, array, range.offset + first - p->offset, to);
  }
}

// As above, into the table's values.
void read_values(const Checkpoint& c, const std::string& array, ParameterTable& table) {
  read_trainable(
      c, array, table,
      [&](int) {
        return Part{0, table.values().numel()};
      },
      [&](int) { return table.values(); });
}

void read_fixed(const Checkpoint& c, ParameterTable& table) {
  const auto it = c.arrays().find("fixed");
  WEFT_CHECK(it != c.arrays().end() && it->second == table.fixed().numel(), Exit::checkpoint,
             "continue with the [model] table that the run was started with",
             "{}: its parameters that are not trained do not fit the deck's model",
             c.dir().string());
  read_into(c, "fixed", 0, table.fixed());
}

}  // namespace

CheckpointInfo describe_state(const Deck& deck, ParameterTable& table, std::int64_t steps_done) {
  CheckpointInfo info;
  info.step = steps_done;
  info.deck = to_toml(deck);
  info.build = version_line();
  for (const auto& p : table.all())
    if (p->trainable)
      info.tensors.push_back(
          {p->name, {p->shape.dims().begin(), p->shape.dims().end()}, p->offset});
  return info;
}

std::vector<FlatArray> flat_arrays(ParameterTable& table, const OptimizerState& state, int rank,
                                   int ranks) {
  std::vector<std::int64_t> cuts;
  for (const ParameterTable::Bucket& b : table.buckets()) cuts.push_back(b.end);
  // Of what this rank holds of a bucket it writes its part: all of it, if the state is sharded.
  const auto flat = [&](const char* name, Tensor (OptimizerState::*array)(int) const) {
    FlatArray a{name, cuts.back(), cuts, {}, table.values().device()};
    for (int b = 0; b < static_cast<int>(cuts.size()); ++b) {
      const auto& bucket = table.buckets()[static_cast<std::size_t>(b)];
      const Part mine = part_of(bucket.begin, bucket.end, rank, ranks), held = state.part(b);
      const Tensor t = (state.*array)(b).slice(mine.begin - held.begin, mine.end - held.begin);
      a.parts.emplace_back(t.device_data<float>(), static_cast<std::size_t>(t.numel()));
    }
    return a;
  };
  const Part fixed = part_of(0, table.fixed().numel(), rank, ranks);
  const FlatArray rest{
      "fixed",
      table.fixed().numel(),
      {},
      {{table.fixed().device_data<float>() + fixed.begin, static_cast<std::size_t>(fixed.size())}},
      table.fixed().device()};
  return {flat("master", &OptimizerState::master), flat("exp_avg", &OptimizerState::exp_avg),
          flat("exp_avg_sq", &OptimizerState::exp_avg_sq), flat("ema", &OptimizerState::ema), rest};
}

void restore_state(const Checkpoint& checkpoint, ParameterTable& table) {
  read_values(checkpoint, "master", table);
  read_fixed(checkpoint, table);
  table.refresh_working();
}

void restore_state(const Checkpoint& checkpoint, ParameterTable& table, OptimizerState& state) {
  const auto read = [&](const char* name, Tensor (OptimizerState::*array)(int) const) {
    read_trainable(
        checkpoint, name, table, [&](int b) { return state.part(b); },
        [&](int b) { return (state.*array)(b); });
  };
  read("master", &OptimizerState::master);
  read("exp_avg", &OptimizerState::exp_avg);
  read("exp_avg_sq", &OptimizerState::exp_avg_sq);
  read("ema", &OptimizerState::ema);
  read_fixed(checkpoint, table);
  table.refresh_working();
}

void restore_ema(const Checkpoint& checkpoint, ParameterTable& table) {
  read_values(checkpoint, "ema", table);
  read_fixed(checkpoint, table);
  table.refresh_working();
}

}  // namespace weft
