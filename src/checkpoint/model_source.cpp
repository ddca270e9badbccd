#include "checkpoint/model_source.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "checkpoint/checkpoint.h"
#include "core/error.h"
#include "core/file.h"
#include "core/philox.h"

namespace weft {
namespace {

namespace fs = std::filesystem;

constexpr const char* random_prefix = "random:";

// Parameters that start at zero get small random values: otherwise the branches that they scale
// would add nothing.
void draw(ParameterTable& table, std::uint64_t seed) {
  table.initialise(seed);
  std::uint64_t number = 0;
  for (const auto& p : table.all()) {
    ++number;
    if (p->init.kind != Init::Kind::constant || p->init.a != 0) continue;
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
    : weights_(weights), ema_(ema) {
  if (is_random_source(weights_)) {
    // Numbers of up to 18 digits always fit the 64 bits of stoull() in load().
    const std::string seed = weights_.substr(std::string(random_prefix).size());
    WEFT_CHECK(!seed.empty() && seed.find_first_not_of("0123456789") == std::string::npos &&
                   seed.size() <= 18,
               Exit::usage, "write a number, such as random:1", "{} = \"{}\"", key, weights_);
    identity_ = weights_;
    return;
  }
  if (!weights_.empty() && is_there(fs::path(weights_) / "manifest.json", Exit::checkpoint)) {
    checkpoint_ = Checkpoint::open(weights_);
    identity_ = fmt::format("{} {} {}", file_identity(checkpoint_->dir() / "manifest.json"),
                            checkpoint_->info().step, ema_ ? "ema" : "weights");
    return;
  }
  const bool run = !weights_.empty() && is_there(fs::path(weights_) / "latest", Exit::checkpoint);
  const std::string from = run ? weights_ : weights_.empty() ? run_dir : "";
  if (from.empty() && weights_.empty())
    throw Error(Exit::usage, key + " is empty",
                "name a safetensors file, a folder with an index, or a run directory", __FILE__,
                __LINE__);
  if (!from.empty()) {
    checkpoint_ = Checkpoint::newest(from, world);
    WEFT_CHECK(checkpoint_.has_value(), Exit::checkpoint,
               fmt::format("train first, or name weights with {}=FILE.safetensors", key),
               "{} has no checkpoint to take weights from", from);
    identity_ = fmt::format("{} {} {}", file_identity(checkpoint_->dir() / "manifest.json"),
                            checkpoint_->info().step, ema_ ? "ema" : "weights");
    return;
  }
  check_weights_exist(key, weights_, "; random:1 is random ones");
  identity_ = folder_identity(weights_);
}

std::string ModelSource::describe() const {
  if (!checkpoint_) return weights_;
  return fmt::format("{} of {}", ema_ ? "EMA" : "weights", checkpoint_->dir().string());
}

std::optional<WeightFiles> ModelSource::files() const {
  if (checkpoint_ || weights_.starts_with(random_prefix)) return std::nullopt;
  return WeightFiles::open(weights_);
}

void ModelSource::load(ParameterTable& table, const WeightNames& names, bool bf16) const {
  table.allocate_for_inference(bf16);
  if (weights_.starts_with(random_prefix)) {
    draw(table, std::stoull(weights_.substr(std::string(random_prefix).size())));
  } else if (checkpoint_) {
    if (ema_)
      restore_ema(*checkpoint_, table);
    else
      restore_state(*checkpoint_, table);
  } else {
    load_weights(weights_, table, names);
  }
}

}  // namespace weft
