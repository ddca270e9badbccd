#include "plan/command.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <thread>

#include "core/error.h"
#include "core/host.h"
#include "models/registry.h"
#include "plan/simulation_job.h"
#include "report/html.h"
#include "report/plot.h"

namespace weft {
namespace {

namespace sim = simulation;
using Json = nlohmann::ordered_json;

// Of one rank count: means over the steps.
struct Result {
  int ranks = 1;
  std::int64_t micro_batches = 0;  // a step
  double seconds = 0, work = 0;  // a step; work: forward and backward of a rank, without variation
  double efficiency = 1;         // work a second and rank, over that of one rank alone
  double placed = 0,
         worst_placed =
             0;  // (greatest - mean) / mean of the ranks' work as shared out: mean, worst step
  double spread = 0, wait = 0, exposed = 0;  // of the step played; the last two as shares of it
  double took = 0;                           // seconds of simulating
};

struct Subject {
  sim::DeckStep step;
  sim::BarrierModel barriers;
  sim::Network network;
  std::string fabric;
};

std::vector<std::string> tokens_of(const std::vector<std::string>& known,
                                   const std::vector<std::string>& asked, const char* option) {
  for (const std::string& word : asked) {
    if (std::find(known.begin(), known.end(), word) != known.end()) continue;
    throw Error(Exit::usage, fmt::format("{} {} is unknown", option, word),
                fmt::format("choose of {}", fmt::join(known, ", ")), __FILE__, __LINE__);
  }
  return asked;
}

// Model, data and deck, whatever the machine.
Subject make_subject(const Deck& deck, const SimulateRequest& request, const std::string& fabric,
                     TrainingTask& task) {
  Subject s;
  s.fabric = fabric;
  const std::shared_ptr<const ClipSource> source = open_clip_source(deck.data, deck.media);
  s.step.buckets = source->buckets();
  s.step.planner = [source, sizes = batch_sizes(deck.train, source->buckets()),
                    seed = static_cast<std::uint64_t>(deck.run.seed)](
                       std::int64_t micro_batches) -> std::shared_ptr<const StepPlan> {
    return source->plan_steps(sizes, micro_batches, seed);
  };
  s.step.batch_sizes = batch_sizes(deck.train, s.step.buckets);
  s.step.seed = static_cast<std::uint64_t>(deck.run.seed);
  s.step.sp = static_cast<int>(deck.parallel.sp);
  s.step.micro_batches = deck.train.micro_batches;
  s.step.variation = request.variation;
  s.step.sharded = deck.parallel.zero == 1;
  s.step.overlap = deck.parallel.overlap;
  s.step.bf16_wire = deck.parallel.wire == "bf16";
  s.step.bf16_model = task.bf16();
  task.check_plan(s.step.buckets, false);
  // Laid out as the trainer does it; the memory is address space that is never touched.
  task.params().allocate(static_cast<std::int64_t>(deck.parallel.bucket_mib * (1 << 20) / 4),
                         task.bf16(), true);
  s.step.schedule = task.schedule(s.step.buckets);
  s.barriers.rate = request.barrier_tflops * 1e12;
  s.barriers.parameters = static_cast<double>(task.params().trainable_elements());
  for (const auto& p : task.params().all()) s.barriers.tensors += p->trainable ? 1 : 0;
  for (std::size_t b = 0; b < s.step.buckets.size(); ++b) {
    const Bucket& bucket = s.step.buckets[b];
    s.step.batch_sizes[b] = std::clamp<std::int64_t>(bucket.clips, 1, s.step.batch_sizes[b]);
    // A third of a step without recomputation is the forward.
    s.barriers.dit_flops.push_back(task.cost(bucket, 0) / 3);
  }
  return s;
}

// Ranks that exchange within micro-batches, on this network.
void add_exchange(const TrainingTask& task, int most_ranks, Subject& s) {
  if (task.lockstep_ranks(most_ranks) == 1) return;
  s.step.lockstep = [&task](int ranks) { return task.lockstep_ranks(ranks); };
  if (s.fabric == "local") return;  // measured costs have it
  s.step.exchange = [&task, machine = described_machine(s.fabric, 0)](int ranks) {
    return inner_exchange_seconds(task, {task.lockstep_ranks(ranks), machine});
  };
}

// The machine, and what a micro-batch costs on it.
void add_machine(const Deck& deck, const SimulateRequest& request, int ranks, Subject& s) {
  std::vector<double> recompute(s.step.buckets.size(), deck.model.recompute);
  if (s.fabric == "local") {
    WEFT_CHECK(!request.costs.empty(), Exit::usage, "add --costs RUN of a run on one rank here",
               "--fabric local wants measured costs");
    s.network = sim::local_network(
        request.cores > 0 ? request.cores : static_cast<int>(std::thread::hardware_concurrency()),
        request.link_rate * 1e9);
  } else {
    PlanRequest wanted;
    wanted.gpus = ranks;
    wanted.memory_gb = request.memory_gb;
    wanted.fabric = s.fabric;
    wanted.rates = request.rates;
    const Plan plan = make_plan(deck, wanted, MPI_COMM_SELF);
    s.network = sim::network_of(plan.machine);
    s.step.costs = sim::planned_costs(plan, s.step.sharded);
    for (std::size_t b = 0; b < recompute.size(); ++b)
      recompute[b] = plan.buckets[b].memory.recompute;
  }
  if (!request.costs.empty())
    s.step.costs = sim::measured_costs(request.costs, deck, s.step.buckets, recompute);
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

Result play_one(Subject s, const std::string& style, int ranks, const SimulateRequest& request) {
  const auto start = std::chrono::steady_clock::now();
  Result r;
  r.ranks = ranks;
  std::vector<sim::StepTimes> steps;
  if (style == "weft") {
    if (request.per_gpu > 0) s.step.micro_batches = request.per_gpu * ranks / s.step.sp;
    r.micro_batches = s.step.micro_batches;
    const int together = s.step.lockstep ? s.step.lockstep(ranks) : 1;
    WEFT_CHECK(together == 1 || (r.micro_batches % ranks == 0 && ranks % together == 0),
               Exit::usage, "take --per-gpu 1, and --gpus that are multiples of train.bn_ranks",
               "{} micro-batches a step do not share out evenly over {} ranks, of which {} share "
               "the statistics of batch norm",
               r.micro_batches, ranks, together);
    add_placement(s, request.steps, request.warmup, r);
    steps = sim::play(s.network, ranks, sim::overlapped_job(s.step, ranks), request.steps,
                      request.warmup);
  } else {
    r.micro_batches = ranks;
    steps = sim::play(s.network, ranks, sim::barriers_job(s.step, ranks, s.barriers), request.steps,
                      request.warmup);
  }
  for (const sim::StepTimes& t : steps) {
    const double n = request.steps;
    r.seconds += t.seconds / n;
    r.spread += t.spread() / n;
    r.wait += t.wait / n;
    r.exposed += t.exposed / n;
    if (style == "barrier") r.work += t.mean_busy / n;
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
          {"gradient_buckets", s.step.schedule.size()},
          {"buckets", buckets}};
}

Json to_json(const Result& r) {
  return {{"ranks", r.ranks},
          {"micro_batches", r.micro_batches},
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
  std::vector<report_page::LegendEntry> legend;
  double most = 1;
  for (std::size_t i = 0; i < curves.size(); ++i) {
    report_page::Curve& c = curves[i];
    c.color = report_page::color_of(i);
    if (!c.y.empty()) legend.push_back({c.color, fmt::format("{}, {:.1f} %", c.name, c.y.back())});
    for (double& ranks : c.x) {
      most = std::max(most, ranks);
      ranks = std::log2(ranks);
    }
  }
  for (double ranks = 1; ranks <= most; ranks *= 2)
    frame.x_labels.emplace_back(std::log2(ranks), fmt::format("{:.0f}", ranks));
  const int y = frame.height - 58 - 17 * static_cast<int>(legend.size());
  return standalone_svg(line_plot(frame, curves), frame, legend, y);
}

}  // namespace

int simulate(const Deck& deck, const SimulateRequest& request) {
  sim::check_available();
  tokens_of({"weft", "barrier"}, request.styles, "--style");
  WEFT_CHECK(deck.model.name == "stdit3" || request.styles == std::vector<std::string>{"weft"},
             Exit::usage, "take --style weft",
             "--style barrier plays Open-Sora's step, and model.name = \"{}\"", deck.model.name);
  WEFT_CHECK(request.steps >= 1 && request.warmup >= 1, Exit::usage, "take 1 step or more",
             "--steps {}, --warmup {}", request.steps, request.warmup);
  for (const int n : request.gpus)
    WEFT_CHECK(n >= 1 && n <= 65536 && n % deck.parallel.sp == 0, Exit::usage,
               "from 1 to 65536, and multiples of parallel.sp", "--gpus {}", n);
  std::vector<int> gpus = request.gpus;
  std::sort(gpus.begin(), gpus.end());

  Json out = {{"kind", "simulation"}, {"version", version_line()}, {"cases", Json::array()}};
  std::vector<report_page::Curve> curves;
  for (const std::string& fabric : request.fabrics) {
    const std::unique_ptr<TrainingTask> task = make_task(deck);
    Subject subject = make_subject(deck, request, fabric, *task);
    // Planned once, for the most ranks: all rank counts are played with its costs and
    // recomputation.
    add_machine(deck, request, gpus.back(), subject);
    add_exchange(*task, gpus.back(), subject);
    for (const std::string& style : request.styles) {
      fmt::print("\n{} on {}, costs {}\n", style, fabric,
                 style == "weft" ? subject.step.costs.origin
                                 : fmt::format("at {} TFLOP/s", request.barrier_tflops));
      fmt::print("{:>6} {:>8} {:>10} {:>10} {:>13} {:>8} {:>8} {:>8}\n", "ranks", "micro-b.",
                 "step s", "efficiency", "placed spread", "spread", "waiting", "exposed");
      // The baseline: one rank (or sp group) alone, without variation and without waiting.
      Subject alone = subject;
      alone.step.variation = 0;
      const Result one = play_one(alone, style, alone.step.sp, request);
      report_page::Curve curve;
      curve.name = fmt::format("{} {}", style, fabric);
      Json results = Json::array();
      for (const int n : gpus) {
        Result r = play_one(subject, style, n, request);
        r.efficiency = r.work / r.seconds / (one.work / one.seconds);
        fmt::print(
            "{:>6} {:>8} {:>10.4f} {:>8.2f} % {:>11.2f} % {:>6.2f} % {:>6.2f} % {:>6.2f} %\n", n,
            r.micro_batches, r.seconds, 100 * r.efficiency, 100 * r.worst_placed, 100 * r.spread,
            100 * r.wait, 100 * r.exposed);
        std::fflush(stdout);
        results.push_back(to_json(r));
        curve.x.push_back(n);
        curve.y.push_back(100 * std::min(1.0, r.efficiency));
      }
      if (std::any_of(results.begin(), results.end(),
                      [](const Json& r) { return r.at("efficiency").get<double>() > 1.0005; }))
        fmt::print("{}\n", above_one_rank);
      curves.push_back(std::move(curve));
      Json one_case = describe(subject, request);
      one_case["style"] = style;
      one_case["results"] = std::move(results);
      out["cases"].push_back(std::move(one_case));
    }
  }
  if (!request.json.empty()) {
    out["deck"] = to_toml(deck);
    write_file(request.json, out.dump(1) + "\n");
  }
  if (!request.plot.empty()) write_file(request.plot, efficiency_plot(std::move(curves)));
  return 0;
}

Command simulate_command() {
  const auto r = std::make_shared<SimulateRequest>();
  Command c{"simulate", "play the deck's steps on many ranks of a described machine (SimGrid)",
            [r](const Deck& deck, MPI_Comm) { return simulate(deck, *r); }};
  c.first_rank_only = true;
  c.takes_deck();
  c.option("--gpus", r->gpus, "rank counts, with commas").commas = true;
  c.option("--fabric", r->fabrics, "8x400, 1x200, any CARDSxGBITS, or local; with commas").commas =
      true;
  c.option("--style", r->styles, "weft, barrier (as Open-Sora 1.2), or both").commas = true;
  c.option("--memory", r->memory_gb, "GB of a GPU: decides what is recomputed");
  c.option("--per-gpu", r->per_gpu,
           "micro-batches a rank (0: train.micro_batches, over all ranks)");
  c.option("--costs", r->costs, "measured: run directory or JSON file");
  c.option("--rates", r->rates, "rates of the device to predict from (JSON)");
  c.option("--cores", r->cores, "processors of the host, for --fabric local");
  c.option("--link-rate", r->link_rate, "GB/s between its ranks (weft bench comm)");
  c.option("--steps", r->steps, "steps that count");
  c.option("--warmup", r->warmup, "steps before them");
  c.option("--cv", r->variation, "how much a rank's time for a step varies, as a share of it");
  c.option("--barrier-tflops", r->barrier_tflops, "rate that --style barrier computes at");
  c.option("--json", r->json, "file for the results");
  c.option("--plot", r->plot, "SVG file of the curves");
  return c;
}

}  // namespace weft
