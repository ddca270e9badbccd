#include "checkpoint/state.h"

#include <algorithm>
#include <map>

#include "core/error.h"
#include "core/host.h"

namespace weft {
namespace {

// Null where the checkpoint has no trained tensor of that name.
const TensorRange* find_range(const Checkpoint& c, const Parameter& p) {
  for (const TensorRange& r : c.info().tensors)
    if (r.name == p.name) {
      const Shape shape{std::span<const std::int64_t>(r.shape)};
      WEFT_CHECK(shape == p.shape, Exit::checkpoint,
                 "continue with the [model] table that the run was started with, or name another "
                 "run.dir",
                 "{}: tensor {} has shape {}, the deck's model wants {}", c.dir().string(), p.name,
                 shape.str(), p.shape.str());
      return &r;
    }
  return nullptr;
}

const TensorRange& range_of(const Checkpoint& c, const Parameter& p) {
  const TensorRange* range = find_range(c, p);
  WEFT_CHECK(
      range != nullptr, Exit::checkpoint,
      "continue with the [model] table that the run was started with, or name another run.dir",
      "{} has no tensor {}", c.dir().string(), p.name);
  return *range;
}

// Fills `to`, which may be on a GPU, with elements of `array` from `offset` on.
void read_into(const Checkpoint& c, const std::string& array, std::int64_t offset, Tensor& to) {
  if (to.device() == DeviceKind::cpu) {
    c.read(array, offset, to.span<float>());
    return;
  }
  std::vector<float> values(static_cast<std::size_t>(to.numel()));
  c.read(array, offset, values);
  to.set(std::span<const float>(values));
}

// Reads `array` of the checkpoint into `target(b)`, which holds elements `owned(b)` of the flat
// space, for each bucket b.
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

void read_fixed(const Checkpoint& c, ParameterTable& table) {
  const auto it = c.arrays().find("fixed");
  WEFT_CHECK(it != c.arrays().end() && it->second == table.fixed().numel(), Exit::checkpoint,
             "continue with the [model] table that the run was started with",
             "{}: its parameters that are not trained do not fit the deck's model",
             c.dir().string());
  read_into(c, "fixed", 0, table.fixed());
}

// Reads weights alone, piece by piece, into whatever formats the table keeps. A parameter that the
// checkpoint does not name was not trained by the run, whether or not this table would train it.
void read_weights(const Checkpoint& c, const std::string& array, ParameterTable& table) {
  std::map<const Parameter*, std::int64_t> fixed;
  const Parameter* first_fixed = nullptr;  // the last to be placed
  const std::int64_t length = table.lay_out_fixed(
      [&](const Parameter& p) { return find_range(c, p) == nullptr; },
      [&](Parameter& p, std::int64_t offset) { fixed[first_fixed = &p] = offset; });
  const auto stored = c.arrays().find("fixed");
  const std::int64_t there = stored == c.arrays().end() ? 0 : stored->second;
  WEFT_CHECK(length == there, Exit::checkpoint,
             "use the [model] and [vae] tables that the run was started with",
             "{} has {}: the deck's model has {} elements more than it names, and its run left {} "
             "untrained",
             c.dir().string(),
             first_fixed != nullptr ? "no tensor " + first_fixed->name : "tensors of another model",
             length, there);
  constexpr std::int64_t piece = std::int64_t{1} << 20;
  for (const auto& p : table.all()) {
    const auto place = fixed.find(p.get());
    const bool trained = place == fixed.end();
    const std::int64_t offset = trained ? range_of(c, *p).offset : place->second;
    for (std::int64_t at = 0; at < p->shape.numel(); at += piece) {
      std::vector<float> values(static_cast<std::size_t>(std::min(piece, p->shape.numel() - at)));
      c.read(trained ? array : "fixed", offset + at, values);
      p->set(at, values);
    }
  }
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
  // Each rank writes its part of every bucket: all that it holds if the state is sharded.
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
  std::vector<FlatArray> all = {flat("master", &OptimizerState::master),
                                flat("exp_avg", &OptimizerState::exp_avg)};
  if (state.has_squares()) all.push_back(flat("exp_avg_sq", &OptimizerState::exp_avg_sq));
  all.push_back(flat("ema", &OptimizerState::ema));
  all.push_back(rest);
  return all;
}

void restore_state(const Checkpoint& checkpoint, ParameterTable& table) {
  read_weights(checkpoint, "master", table);
}

void restore_state(const Checkpoint& checkpoint, ParameterTable& table, OptimizerState& state) {
  const auto read = [&](const char* name, Tensor (OptimizerState::*array)(int) const) {
    read_trainable(
        checkpoint, name, table, [&](int b) { return state.part(b); },
        [&](int b) { return (state.*array)(b); });
  };
  read("master", &OptimizerState::master);
  read("exp_avg", &OptimizerState::exp_avg);
  if (state.has_squares()) read("exp_avg_sq", &OptimizerState::exp_avg_sq);
  read("ema", &OptimizerState::ema);
  read_fixed(checkpoint, table);
  table.refresh_working();
}

void restore_ema(const Checkpoint& checkpoint, ParameterTable& table) {
  read_weights(checkpoint, "ema", table);
}

}  // namespace weft
