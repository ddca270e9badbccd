#include "checkpoint/model_source.h"

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "checkpoint/checkpoint.h"
#include "config/deck_table.h"
#include "core/error.h"
#include "core/file.h"
#include "core/log.h"
#include "core/philox.h"

namespace weft {
namespace {

namespace fs = std::filesystem;

constexpr const char* random_prefix = "random:";

// Parameters that start at zero get small random values: otherwise the branches that they scale
// would add nothing.
void draw(ParameterTable& table, std::uint64_t seed, const std::string& prefix) {
  table.initialise(seed, prefix);
  std::uint64_t number = 0;
  for (const auto& p : table.all()) {
    ++number;
    if (p->init.kind != Init::Kind::constant || p->init.a != 0) continue;
    if (!p->name.starts_with(prefix)) continue;
    const double deviation =
        0.3 / std::sqrt(static_cast<double>(p->shape.numel()) / static_cast<double>(p->shape[0]));
    std::vector<float> values(p->shape.numel());
    // 1 keeps these draws apart from those of ParameterTable::initialise(), which uses 0.
    const Philox random(seed, Purpose::init, 1, number);
    for (std::size_t i = 0; i < values.size(); ++i)
      values[i] = static_cast<float>(deviation) * random.normal(static_cast<std::uint32_t>(i));
    p->set(0, values);
  }
}

}  // namespace

bool is_random_source(const std::string& weights) { return weights.starts_with(random_prefix); }

void check_weights_exist(const std::string& key, const std::string& weights,
                         const std::string& otherwise) {
  WEFT_CHECK(is_there(weights, Exit::data), Exit::data,
             "check the path, or fetch and convert the released weights first "
             "(docs/checkpoints.md)" +
                 otherwise,
             "{} = \"{}\" does not exist", key, weights);
}

ModelSource::ModelSource(const std::string& key, const std::string& weights,
                         const std::string& run_dir, bool ema, MPI_Comm world)
    : key_(key), weights_(weights), ema_(ema) {
  if (is_random_source(weights_)) {
    // Numbers of up to 18 digits always fit the 64 bits of stoull() in load().
    const std::string seed = weights_.substr(std::string(random_prefix).size());
    WEFT_CHECK(!seed.empty() && seed.find_first_not_of("0123456789") == std::string::npos &&
                   seed.size() <= 18,
               Exit::usage, "write a number, such as random:1", "{} = \"{}\"", key, weights_);
    identity_ = weights_;
    if (log::rank() == 0)
      log::warn("{} = {}: a network of random numbers, whose results mean nothing", key, weights_);
    return;
  }
  const auto holds = [&](const char* file) {
    return !weights_.empty() && is_there(fs::path(weights_) / file, Exit::checkpoint);
  };
  if (holds("manifest.json")) {
    checkpoint_ = Checkpoint::open(weights_);
  } else if (weights_.empty() || holds("latest")) {
    const std::string& from = weights_.empty() ? run_dir : weights_;
    WEFT_CHECK(!from.empty(), Exit::usage,
               "name a safetensors file, a folder with an index, or a run directory", "{} is empty",
               key);
    checkpoint_ = Checkpoint::newest(from, world);
    WEFT_CHECK(checkpoint_.has_value(), Exit::checkpoint,
               fmt::format("train first, or name weights with {}=FILE.safetensors", key),
               "{} has no checkpoint to take weights from", from);
  }
  if (checkpoint_) {
    identity_ = fmt::format("{} {} {}", file_identity(checkpoint_->dir() / "manifest.json"),
                            checkpoint_->info().step, ema_ ? "ema" : "weights");
    of_checkpoint_ = adapter_facts(*checkpoint_);
    if (of_checkpoint_) identity_ += " on " + of_checkpoint_->base_hash;
    return;
  }
  check_weights_exist(key, weights_, "; random:1 is random ones");
  identity_ = folder_identity(weights_);
}

void ModelSource::add_adapters(const std::string& key, const std::vector<std::string>& named,
                               MPI_Comm world) {
  for (const std::string& text : named) {
    const NamedAdapter& n = adapters_.emplace_back(find_adapter(key, text, world));
    identity_ += fmt::format(
        "; {} x {}", n.factor,
        n.checkpoint ? fmt::format("{} {} {}", file_identity(n.checkpoint->dir() / "manifest.json"),
                                   n.checkpoint->info().step, ema_ ? "ema" : "weights")
                     : folder_identity(n.path));
  }
}

RunNotes ModelSource::notes() const { return checkpoint_ ? checkpoint_->info().notes : RunNotes(); }

std::string ModelSource::describe() const {
  std::string text = weights_;
  if (checkpoint_)
    text = fmt::format("{} of {}", ema_ ? "EMA" : "weights", checkpoint_->dir().string());
  if (of_checkpoint_) text = of_checkpoint_->base + " + " + text;
  for (const NamedAdapter& n : adapters_)
    text +=
        fmt::format(" + {} x {}", n.factor, n.checkpoint ? n.checkpoint->dir().string() : n.path);
  return text;
}

std::optional<WeightFiles> ModelSource::files() const {
  if (checkpoint_ || weights_.starts_with(random_prefix)) return std::nullopt;
  return WeightFiles::open(weights_);
}

void ModelSource::load(ParameterTable& table, const WeightNames& names, bool bf16) const {
  table.allocate_for_inference(bf16);
  read(table, names);
}

void ModelSource::read(ParameterTable& table, const WeightNames& names) const {
  if (weights_.starts_with(random_prefix)) {
    draw(table, std::stoull(weights_.substr(std::string(random_prefix).size())), names.prefix);
  } else if (of_checkpoint_) {
    WEFT_CHECK(
        is_there(of_checkpoint_->base, Exit::data), Exit::data,
        fmt::format("name the base, with xxh3 {}, as {}, and {} as generate.adapters",
                    of_checkpoint_->base_hash, key_, checkpoint_->dir().parent_path().string()),
        "{} holds adapters, and their base {} does not exist", checkpoint_->dir().string(),
        of_checkpoint_->base);
    load_weights(of_checkpoint_->base, table, names);
  } else if (checkpoint_) {
    WEFT_CHECK(names.prefix.empty(), Exit::usage,
               "write its weights into a file (weft export RUN FILE), and name that",
               "{} = {} is a run; experts are read from files", key_, checkpoint_->dir().string());
    if (ema_)
      restore_ema(*checkpoint_, table, std::nullopt, names.spare);
    else
      restore_state(*checkpoint_, table, names.spare);
  } else {
    load_weights(weights_, table, names);
  }
  merge(table, names);
}

// Reads the adapters and adds them to the weights, which are loaded.
void ModelSource::merge(ParameterTable& table, const WeightNames& names) const {
  std::vector<WeightedAdapter> adapters;
  if (of_checkpoint_) adapters.push_back({adapter_of(*checkpoint_, ema_), 1});
  for (const NamedAdapter& n : adapters_) adapters.push_back({n.read(ema_), n.factor});
  if (adapters.empty()) return;
  const bool known =
      !std::exchange(base_checked_, true) && std::ranges::any_of(adapters, [](const auto& a) {
        return !a.adapter.facts.base_hash.empty();
      });
  const std::string base = of_checkpoint_ ? of_checkpoint_->base
                           : checkpoint_  ? "checkpoint " + checkpoint_->dir().string()
                                          : weights_;
  const std::string values = known ? hash_of_values(table, names.prefix) : "";
  if (known && !is_random_source(weights_))
    for (const auto& [a, factor] : adapters) check_base(a.path, a.facts, base, values);
  merge_adapters(table, adapters, names);
}

}  // namespace weft
