#include "validation/simulate/deck_step.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "checkpoint/checkpoint.h"
#include "checkpoint/manifest.h"
#include "core/clock.h"
#include "core/error.h"
#include "core/json.h"
#include "core/philox.h"
#include "train/cost_table.h"
#include "train/metrics/metrics.h"

namespace weft::simulation {

namespace {

namespace fs = std::filesystem;

// Seconds of a micro-batch of each bucket, 0 where none is known.
std::vector<double> agreed_seconds(const fs::path& run, std::size_t buckets) {
  const std::vector<std::int64_t> steps = checkpoint::list_steps(run);
  WEFT_CHECK(!steps.empty(), Exit::checkpoint,
             "give a run that has saved (train.checkpoint_every), or a JSON file of seconds",
             "--costs {}: contains no checkpoint", run.string());
  const Checkpoint newest = Checkpoint::open(run / checkpoint::step_name(steps.front()));
  const std::string& costs = newest.info().notes.costs;
  WEFT_CHECK(!costs.empty(), Exit::checkpoint,
             "train some more steps with this version of weft, which records them",
             "--costs {}: {} has no record of its costs", run.string(), newest.dir().string());
  return CostTable::seconds_in(costs, buckets);
}

// Medians over a run's steps, the first ones left out: caches and the costs themselves settle
// there.
void add_medians(const fs::path& run, bool sharded, StepCosts& costs) {
  std::ifstream in(run / "metrics.jsonl");
  std::vector<double> optimizer, rest;
  std::size_t ranks = 1;
  constexpr std::int64_t settling = 5;
  for (std::string line; std::getline(in, line);) {
    const nlohmann::json j = parse_step_line(line);
    if (j.is_discarded() || !j.contains("split") || j["step"].get<std::int64_t>() < settling)
      continue;
    double parts = 0;
    for (const auto& [name, seconds] : j["split"].items()) parts += seconds.get<double>();
    optimizer.push_back(j["split"].value("optimizer", 0.0));
    rest.push_back(std::max(0.0, j.value("seconds", 0.0) - parts));
    if (j.contains("rank_busy")) ranks = j["rank_busy"].size();
  }
  // A sharded run measured a rank's share, but costs.optimizer stands for all parameters.
  costs.optimizer = upper_median(optimizer) * (sharded ? static_cast<double>(ranks) : 1);
  costs.host = upper_median(rest);
}

std::vector<double> seconds_of_file(const fs::path& file, std::span<const Bucket> buckets,
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
    for (const Bucket& b : buckets) seconds.push_back(of.value(b.name, 0.0));
  } catch (const nlohmann::json::exception& e) {
    throw Error(Exit::usage, fmt::format("--costs {}: {}", file.string(), e.what()), hint, __FILE__,
                __LINE__);
  }
  return seconds;
}

}  // namespace

StepCosts measured_costs(const std::string& run_or_file, const Deck& deck,
                         std::span<const Bucket> buckets, std::span<const double> recompute) {
  const fs::path path = run_or_file;
  StepCosts costs;
  std::vector<double> seconds;
  std::error_code none;
  if (fs::is_directory(path, none)) {
    seconds = agreed_seconds(path, buckets.size());
    add_medians(path, deck.parallel.zero >= 1, costs);
  } else {
    seconds = seconds_of_file(path, buckets, costs);
  }
  for (std::size_t b = 0; b < buckets.size(); ++b) {
    WEFT_CHECK(seconds[b] > 0 && std::isfinite(seconds[b]), Exit::usage,
               "measure every bucket that the deck's data has (run longer)",
               "--costs {}: bucket {} has no time", run_or_file, buckets[b].name);
    // The backward takes twice the forward, plus the forward of recomputed blocks.
    const double forward = seconds[b] / (3 + recompute[b]);
    costs.work.push_back({forward, seconds[b] - forward});
  }
  costs.origin = "given in " + run_or_file;
  return costs;
}

namespace {

std::shared_ptr<const StepPlan> make_planner(const DeckStep& step, std::int64_t micro_batches) {
  if (step.planner) return step.planner(micro_batches);
  return std::make_shared<const StepPlanner>(step.buckets, step.batch_sizes, micro_batches,
                                             step.seed);
}

// The work of micro-batch m; a bucket smaller than its batch size makes smaller ones.
Work work_of(const DeckStep& step, const MicroBatch& m) {
  const auto b = static_cast<std::size_t>(m.bucket);
  double share = static_cast<double>(m.clips.size()) / static_cast<double>(step.batch_sizes[b]);
  // Images are smaller than the largest of their bucket.
  if (!m.views.empty())
    share *= static_cast<double>(m.height * m.width) /
             static_cast<double>(step.buckets[b].height * step.buckets[b].width);
  return {share * step.costs.work[b].forward, share * step.costs.work[b].backward};
}

// Log-normal with mean 1: a rank is now and then much slower and never much faster.
double variation_of(const DeckStep& step, std::int64_t number, std::size_t rank) {
  if (step.variation <= 0) return 1;
  // `variance` is that of the logarithm; exp(-variance / 2) brings the mean back to 1.
  const double variance = std::log1p(step.variation * step.variation);
  const Philox random(step.seed, Purpose::synthetic, static_cast<std::uint64_t>(number), 0);
  const double z = random.normal(static_cast<std::uint32_t>(rank));
  return std::exp(std::sqrt(variance) * z - variance / 2);
}

RankWork share_work(const DeckStep& step, const StepPlan& planner, int ranks, std::int64_t number) {
  std::vector<Work> all;
  std::vector<double> costs;
  for (const MicroBatch& m : planner.plan(number)) {
    all.push_back(work_of(step, m));
    costs.push_back(all.back().forward + all.back().backward);
  }
  const SyncMode sync = step.lockstep && step.lockstep(ranks) > 1 ? SyncMode::lockstep
                        : step.in_parts && ranks > 1              ? SyncMode::per_micro_batch
                                                                  : SyncMode::per_step;
  const std::vector<int> owner = owners(costs, ranks / step.sp, sync);
  RankWork mine(static_cast<std::size_t>(ranks));
  for (const std::size_t i : order_of(costs, sync))
    for (int r = 0; r < step.sp; ++r) mine[owner[i] * step.sp + r].push_back(all[i]);
  return mine;
}

// Every micro-batch takes as long as on the slowest rank of each `group`, and the exchanges within
// it.
void wait_in_micro_batches(RankWork& work, int group, double exchange) {
  WEFT_ASSERT(std::ssize(work) % group == 0);
  for (auto first = work.begin(); first != work.end(); first += group)
    for (std::size_t k = 0; k < first->size(); ++k) {
      Work slowest;
      for (auto mine = first; mine != first + group; ++mine)
        slowest = {std::max(slowest.forward, (*mine)[k].forward),
                   std::max(slowest.backward, (*mine)[k].backward)};
      for (auto mine = first; mine != first + group; ++mine)
        (*mine)[k] = {slowest.forward + exchange / 2, slowest.backward + exchange / 2};
    }
}

}  // namespace

Network network_of(const Machine& machine) {
  Network n;
  n.ranks_per_node = machine.ranks_a_node;
  n.inside_rate = machine.link_bandwidth;
  n.node_rate = machine.node_bandwidth();
  n.hop_inside = machine.link_latency;
  n.hop_between = machine.card_latency;
  n.two_level = true;
  return n;
}

Network local_network(int cores, double rate) {
  Network n;
  // All ranks on one node: as many as --gpus accepts.
  n.ranks_per_node = 1 << 16;
  n.inside_rate = rate;
  n.cores_per_node = cores;
  return n;
}

StepCosts planned_costs(const Plan& plan, bool sharded) {
  StepCosts costs;
  for (const BucketPlan& b : plan.buckets)
    costs.work.push_back({b.cost.forward + b.cost.exchange / 2,
                          b.cost.backward + b.cost.again + b.cost.exchange / 2});
  costs.optimizer = plan.step.optimizer * (sharded ? plan.ranks : 1);
  costs.origin = plan.rates_origin;
  return costs;
}

Overlapped overlapped_job(const DeckStep& step, int ranks) {
  Overlapped job;
  const double wire = step.bf16_wire ? 2 : 4;
  for (const BucketSchedule& b : step.schedule) {
    const auto elements = static_cast<double>(b.elements);
    const double weight = step.bf16_model && b.bf16_only ? 2 : 4;
    (b.sharded && ranks > 1 ? job.blocks : job.buckets)
        .push_back({wire * elements, weight * elements, b.ready, b.needed});
  }
  // Weights return last bucket first. A bucket needed before one that returns ahead of it counts as
  // needed together with that one, so that `needed` falls from bucket to bucket.
  for (std::size_t b = job.buckets.size(); b-- > 1;)
    job.buckets[b - 1].needed = std::max(job.buckets[b - 1].needed, job.buckets[b].needed);
  job.sharded = step.sharded;
  job.overlap = step.overlap;
  job.bf16_wire = step.bf16_wire;
  job.optimizer = step.costs.optimizer / (step.sharded ? ranks : 1);
  job.host = step.costs.host;
  job.report_bytes = 16 * sizeof(double) * ranks;
  job.work = [step, ranks, planner = make_planner(step, step.micro_batches)](std::int64_t number) {
    RankWork mine = share_work(step, *planner, ranks, number);
    for (std::size_t r = 0; r < mine.size(); ++r) {
      const double factor = variation_of(step, number, r);
      for (Work& w : mine[r]) w = {factor * w.forward, factor * w.backward};
    }
    if (step.lockstep && step.lockstep(ranks) > 1)
      wait_in_micro_batches(mine, step.lockstep(ranks), step.exchange ? step.exchange(ranks) : 0);
    return mine;
  };
  return job;
}

std::vector<double> rank_seconds(const DeckStep& step, int ranks, std::int64_t number) {
  std::vector<double> seconds;
  for (const auto& mine :
       share_work(step, *make_planner(step, step.micro_batches), ranks, number)) {
    seconds.push_back(0);
    for (const Work& w : mine) seconds.back() += w.forward + w.backward;
  }
  return seconds;
}

}  // namespace weft::simulation
