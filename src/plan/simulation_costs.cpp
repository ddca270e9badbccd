// Costs that were measured: from a run, or from a file.
#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "checkpoint/checkpoint.h"
#include "checkpoint/files.h"
#include "core/error.h"
#include "core/json.h"
#include "core/seal.h"
#include "plan/simulation_job.h"
#include "train/cost_table.h"

namespace weft::simulation {
namespace {

namespace fs = std::filesystem;

double median(std::vector<double> v) {
  if (v.empty()) return 0;
  const auto middle = v.begin() + static_cast<std::ptrdiff_t>(v.size() / 2);
  std::nth_element(v.begin(), middle, v.end());
  return *middle;
}

// Seconds of a micro-batch of each bucket, 0 where none is known.
std::vector<double> agreed_seconds(const fs::path& run, std::size_t buckets) {
  const std::vector<std::int64_t> steps = checkpoint::list_steps(run);
  WEFT_CHECK(!steps.empty(), Exit::checkpoint,
             "give a run that has saved (train.checkpoint_every), or a JSON file of seconds",
             "--costs {}: there is no checkpoint in it", run.string());
  const Checkpoint newest = Checkpoint::open(run / checkpoint::step_name(steps.front()));
  const auto note = newest.info().notes.find("costs");
  WEFT_CHECK(note != newest.info().notes.end(), Exit::checkpoint, "train a little with this weft",
             "--costs {}: {} notes no costs", run.string(), newest.dir().string());
  return CostTable::seconds_in(note->second, buckets);
}

// Medians over a run's steps, the first ones left out: caches and the costs themselves settle there.
void add_medians(const fs::path& run, bool sharded, StepCosts& costs) {
  std::ifstream in(run / "metrics.jsonl");
  std::vector<double> optimizer, rest;
  std::size_t ranks = 1;
  constexpr std::int64_t settling = 5;
  for (std::string line; std::getline(in, line);) {
    const nlohmann::json j = try_parse_json(line);
    if (j.is_discarded() || !seal_holds(line) || !j.contains("split") ||
        j.value("step", std::int64_t{0}) < settling)
      continue;
    double parts = 0;
    for (const auto& [name, seconds] : j["split"].items()) parts += seconds.get<double>();
    optimizer.push_back(j["split"].value("optimizer", 0.0));
    rest.push_back(std::max(0.0, j.value("seconds", 0.0) - parts));
    if (j.contains("rank_busy")) ranks = j["rank_busy"].size();
  }
  costs.optimizer = median(optimizer) * (sharded ? static_cast<double>(ranks) : 1);
  costs.host = median(rest);
}

std::vector<double> seconds_of_file(const fs::path& file, std::span<const weft::Bucket> buckets,
                                    StepCosts& costs) {
  const char* hint =
      "write {\"seconds\": {\"BUCKET\": seconds of a micro-batch, ...}, \"optimizer\": seconds}";
  std::ifstream in(file);
  WEFT_CHECK(in.good(), Exit::usage, "give the directory of a run or a JSON file",
             "--costs {} cannot be read", file.string());
  std::vector<double> seconds;
  try {
    const nlohmann::json j = parse_json(std::string(std::istreambuf_iterator<char>(in), {}));
    costs.optimizer = j.value("optimizer", 0.0);
    costs.host = j.value("host", 0.0);
    const nlohmann::json& of = j.at("seconds");
    for (const weft::Bucket& b : buckets) seconds.push_back(of.value(b.name, 0.0));
  } catch (const nlohmann::json::exception& e) {
    throw Error(Exit::usage, fmt::format("--costs {}: {}", file.string(), e.what()), hint, __FILE__,
                __LINE__);
  }
  return seconds;
}

}  // namespace

StepCosts measured_costs(const std::string& run_or_file, const Deck& deck,
                         std::span<const weft::Bucket> buckets, std::span<const double> recompute) {
  const fs::path path = run_or_file;
  StepCosts costs;
  std::vector<double> seconds;
  if (fs::is_directory(path)) {
    seconds = agreed_seconds(path, buckets.size());
    add_medians(path, deck.parallel.zero == 1, costs);
  } else {
    seconds = seconds_of_file(path, buckets, costs);
  }
  for (std::size_t b = 0; b < buckets.size(); ++b) {
    WEFT_CHECK(seconds[b] > 0 && std::isfinite(seconds[b]), Exit::usage,
               "measure every bucket that the deck's data has (run longer)",
               "--costs {}: bucket {} has no time", run_or_file, buckets[b].name);
    const double forward = seconds[b] / (3 + recompute[b]);
    costs.work.push_back({forward, seconds[b] - forward});
  }
  costs.origin = "given in " + run_or_file;
  return costs;
}

}  // namespace weft::simulation
