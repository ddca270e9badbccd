#include "train/state.h"

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

// Reads `array` of the checkpoint into `to`, a tensor laid out like ParameterTable::values().
void read_trainable(const Checkpoint& c, const std::string& array, ParameterTable& table,
                    Tensor& to) {
  for (const auto& p : table.all()) {
    if (!p->trainable) continue;
    Tensor part = to.slice(p->offset, p->offset + p->shape.numel());
    read_into(c, array, range_of(c, *p).offset, part);
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

std::vector<FlatArray> flat_arrays(ParameterTable& table, OptimizerState& state) {
  const auto flat = [](const char* name, const Tensor& t) {
    return FlatArray{
        name, {t.device_data<float>(), static_cast<std::size_t>(t.numel())}, t.device()};
  };
  return {flat("master", table.values()), flat("exp_avg", state.exp_avg),
          flat("exp_avg_sq", state.exp_avg_sq), flat("ema", state.ema),
          flat("fixed", table.fixed())};
}

void restore_state(const Checkpoint& checkpoint, ParameterTable& table, OptimizerState* state) {
  read_trainable(checkpoint, "master", table, table.values());
  if (state != nullptr) {
    read_trainable(checkpoint, "exp_avg", table, state->exp_avg);
    read_trainable(checkpoint, "exp_avg_sq", table, state->exp_avg_sq);
    read_trainable(checkpoint, "ema", table, state->ema);
  }
  read_fixed(checkpoint, table);
  table.refresh_working();
}

void restore_ema(const Checkpoint& checkpoint, ParameterTable& table) {
  read_trainable(checkpoint, "ema", table, table.values());
  read_fixed(checkpoint, table);
  table.refresh_working();
}

}  // namespace weft
