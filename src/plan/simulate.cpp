#include "plan/simulate.h"

#include <dlfcn.h>
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <optional>
#include <thread>

#include "checkpoint/checkpoint.h"
#include "checkpoint/manifest.h"
#include "core/clock.h"
#include "core/error.h"
#include "core/host.h"
#include "core/json.h"
#include "core/philox.h"
#include "report/html.h"
#include "report/plot.h"
#include "train/cost_table.h"
#include "train/metrics/metrics.h"

namespace weft::simulation {

// The module that plays the simulation.

namespace {

namespace fs = std::filesystem;

// Beside the program, or where an installation or a bundle keeps its libraries.
std::optional<fs::path> find_module() {
  std::error_code ec;
  const fs::path here = fs::read_symlink("/proc/self/exe", ec).parent_path();
  for (const char* place : {"weft_simulation.so", "../lib/weft_simulation.so"})
    if (fs::exists(here / place, ec)) return here / place;
  return std::nullopt;
}

const Player& player() {
  static const Player loaded = [] {
    const std::optional<fs::path> module = find_module();
    WEFT_CHECK(module, Exit::usage,
               "install SimGrid (Debian: libsimgrid-dev) and build again; weft plan estimates "
               "without it",
               "weft simulate needs SimGrid, without which this weft was built: there is no "
               "weft_simulation.so next to the program");
    // RTLD_LOCAL: SimGrid's library also defines MPI functions (SMPI), which the rest of the
    // program must not see.
    void* library = dlopen(module->c_str(), RTLD_NOW | RTLD_LOCAL);
    WEFT_CHECK(library != nullptr, Exit::usage,
               "is SimGrid's library where it was when weft was built?", "{}", dlerror());
    void* entry = dlsym(library, "weft_simulation_player");
    WEFT_CHECK(entry != nullptr, Exit::usage, "build weft again", "{}", dlerror());
    return reinterpret_cast<Player (*)()>(entry)();
  }();
  return loaded;
}

}  // namespace

bool available() { return find_module().has_value(); }
void check_available() { player(); }

std::vector<StepTimes> play(const Network& network, int ranks, const Overlapped& job, int steps,
                            int warmup) {
  return player().overlapped(network, ranks, job, steps, warmup);
}

double play_collective(const Network& network, int ranks, Collective kind, double bytes) {
  return player().collective(network, ranks, kind, bytes);
}

// Costs that were measured.

namespace {

// Seconds of a micro-batch of each bucket, 0 where none is known.
std::vector<double> agreed_seconds(const fs::path& run, std::size_t buckets) {
  const std::vector<std::int64_t> steps = checkpoint::list_steps(run);
  WEFT_CHECK(!steps.empty(), Exit::checkpoint,
             "give a run that has saved (train.checkpoint_every), or a JSON file of seconds",
             "--costs {}: contains no checkpoint", run.string());
  const Checkpoint newest = Checkpoint::open(run / checkpoint::step_name(steps.front()));
  const auto note = newest.info().notes.find("costs");
  WEFT_CHECK(note != newest.info().notes.end(), Exit::checkpoint,
             "train some more steps with this version of weft, which records them",
             "--costs {}: {} has no record of its costs", run.string(), newest.dir().string());
  return CostTable::seconds_in(note->second, buckets);
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
  const Meeting meeting = step.lockstep && step.lockstep(ranks) > 1 ? Meeting::lockstep
                          : step.in_parts && ranks > 1              ? Meeting::always
                                                                    : Meeting::at_the_end;
  const std::vector<int> owner = owners(costs, ranks / step.sp, meeting);
  RankWork mine(static_cast<std::size_t>(ranks));
  for (const std::size_t i : order_of(costs, meeting))
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

namespace weft {
namespace {

namespace sim = simulation;
using Json = nlohmann::ordered_json;

struct SimulateRequest {
  std::vector<int> gpus = {1, 2, 4, 8, 16, 32, 64, 128};
  std::vector<std::string> fabrics;  // none: PlanRequest::default_fabric()
  PlanRequest machine;
  std::int64_t per_gpu =
      0;  // micro-batches a rank and step; 0: the deck's train.micro_batches, shared by all
  std::string costs;     // measured ones (simulation::measured_costs); empty: planned
  int cores = 0;         // of the host, for --fabric local; 0: those of this one
  double link_rate = 2;  // GB/s between its ranks, as weft bench comm measures them
  int steps = 20, warmup = 2;
  double variation = 0.01;
  std::string json, plot;
};

// The result for one rank count: means over the steps.
struct Result {
  int ranks = 1;
  std::int64_t micro_batches = 0;  // a step
  std::size_t gradient_buckets = 0;
  double seconds = 0, work = 0;  // a step; work: forward and backward of a rank, without variation
  double efficiency = 1;         // work a second and rank, over that of one rank alone
  double placed = 0,
         worst_placed =
             0;  // (greatest - mean) / mean of the ranks' work as shared out: mean, worst step
  double spread = 0, wait = 0, exposed = 0;  // of the step played; the last two as shares of it
  double took = 0;                           // seconds of simulating
};

struct Subject {
  sim::DeckStep step;  // its schedule is that of the rank count being played
  sim::Network network;
  std::string fabric;
  std::shared_ptr<SchedulesByRanks> schedules;
};

// Data, deck, gradients.
sim::DeckStep deck_step(const Deck& deck, const std::shared_ptr<PlannedTraining>& training,
                        double variation) {
  sim::DeckStep s;
  s.buckets = training->buckets();
  s.batch_sizes = training->batch_sizes;
  for (std::size_t b = 0; b < s.buckets.size(); ++b)
    s.batch_sizes[b] = std::clamp<std::int64_t>(s.buckets[b].clips, 1, s.batch_sizes[b]);
  s.planner = [training](std::int64_t micro_batches) { return training->steps(micro_batches); };
  s.lockstep = [training](int ranks) { return training->task->lockstep_ranks(ranks); };
  s.seed = training->seed;
  s.sp = static_cast<int>(deck.parallel.sp);
  s.micro_batches = deck.train.micro_batches;
  s.variation = variation;
  s.sharded = deck.parallel.zero >= 1;
  s.overlap = deck.parallel.overlap;
  s.bf16_wire = deck.parallel.wire == "bf16";
  s.bf16_model = training->task->bf16();
  s.in_parts = training->task->params().sharded_buckets() > 0;
  return s;
}

// The step, the machine, and what a micro-batch costs on it: planned once, for the most ranks; all
// rank counts are played with the same costs and recomputation.
Subject make_subject(const Deck& deck, const SimulateRequest& request, const std::string& fabric,
                     int most_ranks) {
  const auto training = std::make_shared<PlannedTraining>(deck, most_ranks, false);
  Subject s{deck_step(deck, training, request.variation), {}, fabric, nullptr};
  std::vector<double> recompute(s.step.buckets.size(), deck.model.recompute);
  if (fabric == "local") {
    WEFT_CHECK(!request.costs.empty(), Exit::usage, "add --costs RUN of a run on one rank here",
               "--fabric local needs measured costs");
    s.network = sim::local_network(
        request.cores > 0 ? request.cores : static_cast<int>(std::thread::hardware_concurrency()),
        request.link_rate * 1e9);
    s.schedules = std::make_shared<SchedulesByRanks>(deck, DeviceKind::cpu, h200_targets());
  } else {
    PlanRequest wanted = request.machine;
    wanted.gpus = most_ranks;
    wanted.fabric = fabric;
    if (wanted.memory_gb == 0) wanted.memory_gb = 141;  // decides what is recomputed
    const Plan plan = make_plan(deck, wanted, MPI_COMM_SELF);
    s.network = sim::network_of(plan.machine);
    s.schedules = std::make_shared<SchedulesByRanks>(deck, DeviceKind::cuda,
                                                     rates_of(wanted, !training->task->bf16()));
    s.schedules->add(most_ranks, plan.schedule);
    s.step.costs = sim::planned_costs(plan, s.step.sharded);
    for (std::size_t b = 0; b < recompute.size(); ++b)
      recompute[b] = plan.buckets[b].memory.recompute;
    // Measured costs have the exchanges within micro-batches. They are the same in every bucket.
    s.step.exchange = [cost = plan.buckets.front().cost, machine = plan.machine,
                       lockstep = s.step.lockstep](int ranks) {
      return all_reduce_seconds(cost, {lockstep(ranks), machine});
    };
  }
  if (!request.costs.empty())
    s.step.costs = sim::measured_costs(request.costs, deck, s.step.buckets, recompute);
  return s;
}

// Work of a rank in each step as it is shared out, before anything varies.
void add_placement(const Subject& s, int steps, int warmup, Result& r) {
  for (int n = warmup; n < steps + warmup; ++n) {
    const std::vector<double> ranks = sim::rank_seconds(s.step, r.ranks, n);
    double sum = 0;
    for (const double x : ranks) sum += x;
    const double mean = sum / r.ranks;
    const double over = *std::max_element(ranks.begin(), ranks.end()) / mean - 1;
    r.work += mean / steps;
    r.placed += over / steps;
    r.worst_placed = std::max(r.worst_placed, over);
  }
}

Result play_one(Subject s, int ranks, const SimulateRequest& request) {
  const auto start = std::chrono::steady_clock::now();
  Result r;
  r.ranks = ranks;
  if (request.per_gpu > 0) s.step.micro_batches = request.per_gpu * ranks / s.step.sp;
  r.micro_batches = s.step.micro_batches;
  s.step.schedule = s.schedules->on(ranks);
  r.gradient_buckets = s.step.schedule.size();
  const int together = s.step.lockstep(ranks);
  WEFT_CHECK(together == 1 || (r.micro_batches % ranks == 0 && ranks % together == 0), Exit::usage,
             "take --per-gpu 1, and --gpus that are multiples of train.bn_ranks",
             "{} micro-batches a step do not share out evenly over {} ranks, of which {} share "
             "the statistics of batch norm",
             r.micro_batches, ranks, together);
  add_placement(s, request.steps, request.warmup, r);
  for (const sim::StepTimes& t : sim::play(s.network, ranks, sim::overlapped_job(s.step, ranks),
                                           request.steps, request.warmup)) {
    const double n = request.steps;
    r.seconds += t.seconds / n;
    r.spread += t.spread() / n;
    r.wait += t.wait / n;
    r.exposed += t.exposed / n;
  }
  r.spread = std::max(0.0, r.spread);  // rounding
  r.wait = std::max(0.0, r.wait) / r.seconds;
  r.exposed = std::max(0.0, r.exposed) / r.seconds;
  r.took = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return r;
}

Json describe(const Subject& s, const SimulateRequest& request) {
  Json buckets = Json::array();
  for (std::size_t b = 0; b < s.step.buckets.size(); ++b)
    buckets.push_back({{"name", s.step.buckets[b].name},
                       {"clips", s.step.buckets[b].clips},
                       {"batch_size", s.step.batch_sizes[b]},
                       {"forward_seconds", s.step.costs.work[b].forward},
                       {"backward_seconds", s.step.costs.work[b].backward}});
  return {{"fabric", s.fabric},
          {"ranks_a_node", s.network.ranks_per_node},
          {"bytes_a_second_inside_a_node", s.network.inside_rate},
          {"bytes_a_second_of_a_node", s.network.node_rate},
          {"cores_a_node", s.network.cores_per_node},
          {"variation", request.variation},
          {"costs", s.step.costs.origin},
          {"optimizer_seconds", s.step.costs.optimizer},
          {"buckets", buckets}};
}

Json to_json(const Result& r) {
  return {{"ranks", r.ranks},
          {"micro_batches", r.micro_batches},
          {"gradient_buckets", r.gradient_buckets},
          {"step_seconds", r.seconds},
          {"work_seconds", r.work},
          {"efficiency", r.efficiency},
          {"placed_spread", r.placed},
          {"placed_spread_worst", r.worst_placed},
          {"spread", r.spread},
          {"wait_share", r.wait},
          {"exposed_share", r.exposed},
          {"simulation_seconds", r.took}};
}

void write_file(const std::string& path, const std::string& text) {
  std::ofstream out(path);
  out << text;
  out.close();
  WEFT_CHECK(out.good(), Exit::usage, "choose a path that can be written", "{} cannot be written",
             path);
}

// Efficiency in percent over ranks, whose axis doubles, as a file of its own.
std::string efficiency_plot(std::vector<report_page::Curve> curves) {
  report_page::PlotFrame frame;
  frame.x_label = "ranks";
  frame.y_label = "simulated efficiency of a rank (%)";
  frame.height = 420;
  frame.from_zero = true;
  std::vector<std::pair<std::string, std::string>> legend;
  double most = 1;
  for (std::size_t i = 0; i < curves.size(); ++i) {
    report_page::Curve& c = curves[i];
    c.color = report_page::color_of(i);
    if (!c.y.empty()) legend.emplace_back(c.color, fmt::format("{}, {:.1f} %", c.name, c.y.back()));
    for (double& ranks : c.x) {
      most = std::max(most, ranks);
      ranks = std::log2(ranks);
    }
  }
  for (double ranks = 1; ranks <= most; ranks *= 2)
    frame.x_labels.emplace_back(std::log2(ranks), fmt::format("{:.0f}", ranks));
  const int y = frame.height - 58 - 17 * static_cast<int>(legend.size());
  return standalone_svg(frame, curves, legend, y);
}

// All rank counts on one fabric: a table on stdout, a case of the JSON, a curve of the plot.
std::pair<Json, report_page::Curve> play_fabric(const Subject& subject,
                                                const std::vector<int>& gpus,
                                                const SimulateRequest& request) {
  fmt::print("\nweft on {}, nodes of {}, costs {}\n", subject.fabric,
             subject.network.ranks_per_node, subject.step.costs.origin);
  fmt::print("{:>6} {:>8} {:>10} {:>10} {:>13} {:>8} {:>8} {:>8}\n", "ranks", "micro-b.", "step s",
             "efficiency", "placed spread", "spread", "waiting", "exposed");
  // The baseline: one rank (or sp group) alone, without variation and without waiting.
  Subject alone = subject;
  alone.step.variation = 0;
  const Result one = play_one(alone, alone.step.sp, request);
  report_page::Curve curve;
  curve.name = subject.fabric;
  Json results = Json::array();
  bool above_one = false;
  for (const int n : gpus) {
    Result r = play_one(subject, n, request);
    r.efficiency = r.work / r.seconds / (one.work / one.seconds);
    fmt::print("{:>6} {:>8} {:>10.4f} {:>8.2f} % {:>11.2f} % {:>6.2f} % {:>6.2f} % {:>6.2f} %\n", n,
               r.micro_batches, r.seconds, 100 * r.efficiency, 100 * r.worst_placed, 100 * r.spread,
               100 * r.wait, 100 * r.exposed);
    std::fflush(stdout);
    results.push_back(to_json(r));
    curve.x.push_back(n);
    curve.y.push_back(100 * std::min(1.0, r.efficiency));
    above_one = above_one || r.efficiency > 1.0005;
  }
  if (above_one) fmt::print("{}\n", above_one_rank);
  Json one_case = describe(subject, request);
  one_case["results"] = std::move(results);
  return {std::move(one_case), std::move(curve)};
}

// Prints a table per fabric, writes JSON and SVG as asked. Returns 0; throws Exit::usage for what
// cannot be done.
int simulate(const Deck& deck, SimulateRequest request) {
  sim::check_available();
  for (const int n : request.gpus)
    WEFT_CHECK(n % deck.parallel.sp == 0, Exit::usage,
               fmt::format("give multiples of parallel.sp = {}", deck.parallel.sp), "--gpus {}", n);
  if (request.fabrics.empty()) request.fabrics = {request.machine.default_fabric()};
  for (const std::string& fabric : request.fabrics) {
    request.machine.fabric = fabric;
    request.machine.complete();
  }
  std::vector<int> gpus = request.gpus;
  std::sort(gpus.begin(), gpus.end());

  Json out = {{"kind", "simulation"}, {"version", version_line()}, {"cases", Json::array()}};
  std::vector<report_page::Curve> curves;
  for (const std::string& fabric : request.fabrics) {
    auto [one_case, curve] =
        play_fabric(make_subject(deck, request, fabric, gpus.back()), gpus, request);
    out["cases"].push_back(std::move(one_case));
    curves.push_back(std::move(curve));
  }
  if (!request.json.empty()) {
    out["deck"] = to_toml(deck);
    write_file(request.json, dump_json(out, 1) + "\n");
  }
  if (!request.plot.empty()) write_file(request.plot, efficiency_plot(std::move(curves)));
  return 0;
}

}  // namespace

Command simulate_command() {
  const auto r = std::make_shared<SimulateRequest>();
  Command c{"simulate", "simulate the deck's steps on many ranks of a described machine (SimGrid)",
            [r](const Deck& deck, MPI_Comm) { return simulate(deck, *r); }};
  c.first_rank_only = true;
  c.takes_deck();
  c.number("--gpus", r->gpus, 1, 65536, "rank counts, with commas").commas = true;
  r->machine.add_options(c);
  c.option("--fabric", r->fabrics, "8x400, 1x200, any CARDSxGBITS, or local; with commas").commas =
      true;
  c.number("--per-gpu", r->per_gpu, 0, 1e6,
           "micro-batches a rank (0: train.micro_batches, over all ranks)");
  c.path("--costs", r->costs, "measured: run directory or JSON file");
  c.number("--cores", r->cores, 0, 65536, "processors of the host, for --fabric local");
  c.number("--link-rate", r->link_rate, 1e-3, 1e6, "GB/s between its ranks (weft bench comm)");
  c.number("--steps", r->steps, 1, 1e6, "measured steps");
  c.number("--warmup", r->warmup, 1, 1e6, "warm-up steps");
  c.number("--cv", r->variation, 0, 10, "variation of a rank's step time, as a share of it");
  c.path("--json", r->json, "file for the results");
  c.path("--plot", r->plot, "SVG file of the curves");
  return c;
}

}  // namespace weft
