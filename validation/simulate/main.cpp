// weft_simulate: a deck's training steps on many ranks of a described machine, as a table and JSON
// (docs/scaling.md).
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <fstream>
#include <nlohmann/json.hpp>
#include <thread>

#include "cli/cli.h"
#include "core/error.h"
#include "core/host.h"
#include "core/json.h"
#include "jobs/jobs.h"
#include "validation/simulate/deck_step.h"

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
  std::string json;
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
  s.planner = [training](std::int64_t micro_batches) {
    return training->source->plan_steps(training->batch_sizes, micro_batches, training->seed);
  };
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

// All rank counts on one fabric: a table on stdout, a case of the JSON.
Json play_fabric(const Subject& subject, const std::vector<int>& gpus,
                 const SimulateRequest& request) {
  fmt::print("\nweft on {}, nodes of {}, costs {}\n", subject.fabric,
             subject.network.ranks_per_node, subject.step.costs.origin);
  fmt::print("{:>6} {:>8} {:>10} {:>10} {:>13} {:>8} {:>8} {:>8}\n", "ranks", "micro-b.", "step s",
             "efficiency", "placed spread", "spread", "waiting", "exposed");
  // The baseline: one rank (or sp group) alone, without variation and without waiting.
  Subject alone = subject;
  alone.step.variation = 0;
  const Result one = play_one(alone, alone.step.sp, request);
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
    above_one = above_one || r.efficiency > 1.0005;
  }
  if (above_one) fmt::print("{}\n", above_one_rank);
  Json one_case = describe(subject, request);
  one_case["results"] = std::move(results);
  return one_case;
}

// Prints a table per fabric, writes JSON as asked. Returns 0; throws Exit::usage for what cannot be
// done.
int simulate(const Deck& deck, SimulateRequest request) {
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
  for (const std::string& fabric : request.fabrics)
    out["cases"].push_back(
        play_fabric(make_subject(deck, request, fabric, gpus.back()), gpus, request));
  if (!request.json.empty()) {
    out["deck"] = to_toml(deck);
    write_file(request.json, dump_json(out, 1) + "\n");
  }
  return 0;
}

Command simulate_command() {
  const auto r = std::make_shared<SimulateRequest>();
  Command c{"", "simulate the deck's steps on many ranks of a described machine (SimGrid)",
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
  return c;
}

}  // namespace
}  // namespace weft

int main(int argc, char** argv) {
  const weft::Command command = weft::simulate_command();
  return weft::run_program(
      argc, argv, {"weft_simulate", command.help, "", {command}, weft::register_deck_tables});
}
