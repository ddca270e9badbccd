// The command `weft plan`, and the report of a training.
#include <algorithm>
#include <cstdio>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>

#include "checkpoint/manifest.h"
#include "core/error.h"
#include "core/host.h"
#include "core/json.h"
#include "core/log.h"
#include "plan/plan.h"
#include "plan/step_model.h"

namespace weft {
namespace {

std::string bytes_text(double bytes) {
  const std::pair<double, const char*> units[] = {
      {1e12, "TB"}, {1e9, "GB"}, {1e6, "MB"}, {1e3, "kB"}};
  for (const auto& [size, unit] : units)
    if (bytes >= size) return fmt::format("{:.2f} {}", bytes / size, unit);
  return fmt::format("{:.0f} B", bytes);
}

std::string time_text(double seconds) {
  if (seconds >= 2 * 86400) return fmt::format("{:.1f} days", seconds / 86400);
  if (seconds >= 2 * 3600) return fmt::format("{:.1f} h", seconds / 3600);
  if (seconds >= 120) return fmt::format("{:.1f} min", seconds / 60);
  if (seconds >= 1) return fmt::format("{:.3f} s", seconds);
  if (seconds >= 1e-3) return fmt::format("{:.2f} ms", 1e3 * seconds);
  return fmt::format("{:.1f} us", 1e6 * seconds);
}

void print_memory(const Plan& p) {
  const auto row = [](const char* kind, std::size_t bytes, const std::string& note = "") {
    if (bytes > 0)
      fmt::print("  {:<14} {:>10}  {}\n", kind, bytes_text(static_cast<double>(bytes)), note);
  };
  fmt::print("\nmemory of a rank\n");
  row("weights", p.memory.weights);
  row("masters", p.memory.masters);
  row("fixed", p.memory.fixed, "parameters that are not trained");
  row("gradients", p.memory.gradients);
  row("moments", p.memory.moments);
  row("EMA", p.memory.ema);
  row("samples", p.memory.samples, "weights of model and codec for sample clips");
  row("activations", p.memory.activations,
      fmt::format("largest bucket; the arena may have {}",
                  bytes_text(static_cast<double>(p.capacity))));
  row("staging", p.memory.staging, "clips on their way to the device");
  row("reserve", p.memory.reserve, "inside operations; libraries take more");
  row("sum", p.memory.total(),
      p.machine.memory_bytes > 0 ? fmt::format("of {}", bytes_text(p.machine.memory_bytes)) : "");
}

void print_buckets(const Plan& p) {
  fmt::print("\n{:<22} {:>5} {:>8} {:>10} {:>9} {:>10} {:>8} {:>7} {:>11}\n", "bucket", "clips",
             p.unit, "memory", "recompute", "time", "TFLOP/s", "share", "equal cost");
  for (const BucketPlan& b : p.buckets) {
    if (b.batch == 0) continue;
    fmt::print("{:<22} {:>5} {:>8} {:>10} {:>8.0f}% {:>10} {:>8.3g} {:>6.1f}% {:>11}\n", b.name,
               b.batch, b.tokens, bytes_text(static_cast<double>(b.memory.bytes)),
               100 * b.memory.recompute, time_text(b.cost.seconds()),
               b.cost.flops / b.cost.seconds() * 1e-12, 100 * b.share,
               b.equal_cost_batch > 0 ? fmt::to_string(b.equal_cost_batch) : "-");
  }
  std::string kept;
  for (const BucketPlan& b : p.buckets)
    if (b.memory.kept > 0)
      kept += fmt::format("{}{} of {}", kept.empty() ? "" : ", ",
                          bytes_text(static_cast<double>(b.memory.kept)), b.name);
  if (!kept.empty()) fmt::print("optional activations kept: {}\n", kept);
}

// The line to paste into a deck: clips with which all micro-batches cost about the same.
std::string batch_sizes_line(const Plan& p) {
  std::string line;
  for (const BucketPlan& b : p.buckets)
    if (b.batch > 0)
      line += fmt::format("{}\"{}={}\"", line.empty() ? "" : ", ", b.name, b.equal_cost_batch);
  return "train.batch_sizes = [" + line + "]";
}

double run_seconds(const Plan& p, const Deck& deck) {
  return p.seconds * static_cast<double>(deck.train.steps);
}

// Seconds of "24h", "90m", "2d", or as Slurm writes them: "1-12:00:00", "24:00:00".
double wall_seconds(const std::string& text) {
  double days = 0, hours = 0, minutes = 0, seconds = 0, value = 0;
  char unit = 0;
  int used = 0;
  const auto whole = [&] {
    return used == static_cast<int>(text.size()) &&
           text.find_first_not_of("0123456789.dhm:-") == text.npos && text.find(":-") == text.npos;
  };
  double all = 0;
  if (std::sscanf(text.c_str(), "%lf%c%n", &value, &unit, &used) == 2 && whole())
    all = value * (unit == 'd' ? 86400 : unit == 'h' ? 3600 : unit == 'm' ? 60 : 0);
  else if ((used = 0, std::sscanf(text.c_str(), "%lf-%lf:%lf:%lf%n", &days, &hours, &minutes,
                                  &seconds, &used) == 4 &&
                          whole()) ||
           (days = used = 0,
            std::sscanf(text.c_str(), "%lf:%lf:%lf%n", &hours, &minutes, &seconds, &used) == 3 &&
                whole()))
    all = 86400 * days + 3600 * hours + 60 * minutes + seconds;
  WEFT_CHECK(all > 0 && all < 1e9, Exit::usage,
             "write 24h, 90m, 2d, or as Slurm does: 24:00:00, 1-12:00:00", "--wall {}", text);
  return all;
}

// Jobs of so many seconds that a training takes, each going on from the last checkpoint of the one
// before.
struct JobChain {
  double wall, start, end;  // seconds: reading the checkpoint; a step, a save and the margin
  std::int64_t steps = 0, jobs = 0;  // of a job; 0: not even one step
};
JobChain job_chain(const Plan& p, const Deck& deck, double wall) {
  JobChain c{wall, p.checkpoint_write,
             p.seconds + p.checkpoint_stall + p.checkpoint_write + deck.run.stop_margin};
  // Saves in between stall, and are written while the steps go on.
  const double step =
      p.seconds + (deck.train.checkpoint_every > 0
                       ? p.checkpoint_stall / static_cast<double>(deck.train.checkpoint_every)
                       : 0);
  // After each step a job looks whether the next one, too, would end in time.
  if (wall >= c.start + c.end)
    c.steps = 1 + static_cast<std::int64_t>((wall - c.start - c.end) / step);
  else if (wall >= c.start + p.seconds + p.checkpoint_stall + p.checkpoint_write)
    c.steps = 1;
  if (c.steps > 0) c.jobs = (deck.train.steps + c.steps - 1) / c.steps;
  return c;
}

void print_jobs(const JobChain& c, const Deck& deck) {
  const std::string parts =
      fmt::format("start {} to read the checkpoint, end {} for a step, a save and run.stop_margin",
                  time_text(c.start), time_text(c.end));
  if (c.jobs == 0)
    fmt::print("jobs of {}: too short for a step ({})\n", time_text(c.wall), parts);
  else
    fmt::print(
        "jobs of {}: {} for {}, {} each ({}; without the time that MPI, CUDA and the data take to "
        "start)\n",
        time_text(c.wall), c.jobs, counted(deck.train.steps, "step"), c.steps, parts);
}

// What keeps ranks from sharing a step out evenly; "" for nothing.
std::string advice(const Plan& p, const Deck& deck) {
  const std::int64_t groups = p.ranks / deck.parallel.sp, micro_batches = deck.train.micro_batches;
  const std::string what = deck.parallel.sp > 1 ? "groups of ranks" : "ranks";
  if (micro_batches < groups)
    return fmt::format("{} of {} {} have no micro-batch: set train.micro_batches to {} or more",
                       groups - micro_batches, groups, what, groups);
  const std::int64_t busiest = (micro_batches + groups - 1) / groups;
  if (micro_batches % groups != 0 && (micro_batches < 8 * groups || p.imbalance > 0.03))
    return fmt::format(
        "{} micro-batches on {} {}: the busiest holds {}, with which {} would take as long: set "
        "train.micro_batches = {} (or {})",
        micro_batches, groups, what, busiest, busiest * groups, busiest * groups,
        (busiest - 1) * groups);
  constexpr std::int64_t enough = 4;  // of a rank: costs of the buckets then even out
  if (groups > 1 && p.imbalance * p.step.compute > 0.03 * p.seconds &&
      micro_batches < enough * groups)
    return fmt::format(
        "with {} of different costs each, {} wait for the slowest: take the batch sizes below, or "
        "train.micro_batches = {} (a larger global batch)",
        counted(micro_batches / groups, "micro-batch", "micro-batches"), what, enough * groups);
  return "";
}

// What makes the run cheaper where blocks are recomputed for lack of memory, each planned alone; ""
// where they are not.
std::string memory_advice(const Plan& p, const Deck& deck, const PlanRequest& request) {
  double again = 0, all = 0;
  for (const BucketPlan& b : p.buckets) {
    if (b.memory.recompute <= deck.model.recompute + 1e-6) continue;
    again += b.share * b.cost.again;
  }
  for (const BucketPlan& b : p.buckets) all += b.share * b.cost.seconds();
  if (again < 0.02 * all) return "";
  const std::string share = fmt::format(
      "recomputation, for lack of memory, takes {:.0f} % of the compute", 100 * again / all);
  if (request.fabric == "local") return share;

  // For as much work: halves of odd batches are not as many clips.
  const auto hours = [&](const Plan& q) {
    return run_seconds(q, deck) * q.ranks / 3600 * p.tokens_a_step / q.tokens_a_step;
  };
  std::multimap<double, std::string> better;  // by hours
  std::string tried;
  const auto attempt = [&](const std::string& what, int ranks, auto&& change) {
    tried += (tried.empty() ? "" : ", ") + what;
    Deck other = deck;
    change(other);
    PlanRequest there = request;
    there.gpus = ranks;
    try {
      const Plan q = make_plan(other, there, MPI_COMM_SELF);
      if (hours(q) < 0.99 * hours(p))
        better.emplace(hours(q), fmt::format("; {}: {} a step, {:.4g} GPU-hours", what,
                                             time_text(q.seconds), hours(q)));
    } catch (const Error& e) {  // what does not fit is no advice
      if (e.code() != Exit::usage) throw;
    }
  };
  for (const std::int64_t sp : {2, 4, 8})
    if (sp > deck.parallel.sp && p.ranks % sp == 0)
      attempt(fmt::format("parallel.sp = {}", sp), p.ranks, [&](Deck& d) { d.parallel.sp = sp; });
  for (const std::int64_t zero : {1, 3})
    if (zero > deck.parallel.zero && p.ranks > 1)
      attempt(fmt::format("parallel.zero = {}", zero), p.ranks,
              [&](Deck& d) { d.parallel.zero = zero; });
  if (deck.model.dtype == "f32")
    attempt("model.dtype = \"bf16\"", p.ranks, [](Deck& d) { d.model.dtype = "bf16"; });
  if (deck.train.ema_decay.size() > 1)
    attempt("one decay in train.ema_decay", p.ranks, [](Deck& d) { d.train.ema_decay.resize(1); });
  const std::int64_t twice = 2 * deck.train.micro_batches;
  if (std::ranges::any_of(p.buckets, [](const BucketPlan& b) { return b.batch > 1; }))
    attempt(fmt::format("half of train.batch_sizes with train.micro_batches = {} (for as many {})",
                        twice, p.unit),
            p.ranks, [&](Deck& d) {
              d.train.micro_batches = twice;
              d.train.batch_sizes.clear();
              for (const BucketPlan& b : p.buckets)
                d.train.batch_sizes.push_back(
                    fmt::format("{}={}", b.name, std::max<std::int64_t>(1, b.batch / 2)));
            });
  attempt(fmt::format("{} ranks", 2 * p.ranks), 2 * p.ranks, [](Deck&) {});

  if (better.empty()) return fmt::format("{}; none of these helps: {}", share, tried);
  std::string text =
      fmt::format("{}: {} a step, {:.4g} GPU-hours", share, time_text(p.seconds), hours(p));
  for (const auto& [_, gain] : better) text += gain;
  return text;
}

void print_step(const Plan& p, const Deck& deck, const std::string& memory) {
  const StepTime& t = p.step;
  const auto share = [&](double seconds) { return 100 * seconds / p.seconds; };
  fmt::print(
      "\nstep of {} on {}: {} ({:.3g} TFLOP/s a rank, {:.3g} {}/s in "
      "all)\n",
      counted(deck.train.micro_batches, "micro-batch", "micro-batches"), counted(p.ranks, "rank"),
      time_text(p.seconds), p.flops_a_step / p.seconds / p.ranks * 1e-12,
      p.tokens_a_step / p.seconds, p.unit);
  fmt::print(
      "  compute               {:>10}  {:.1f} % (of it {:.1f} % of the step waiting for the "
      "slowest)\n",
      time_text(t.compute), share(t.compute), share(t.compute * p.imbalance));
  fmt::print("  exposed communication {:>10}  {:.2f} % (gradients {}, weights {})\n",
             time_text(t.exposed()), share(t.exposed()), time_text(t.exposed_reduce),
             time_text(t.exposed_gather));
  fmt::print("  optimizer             {:>10}  {:.2f} %\n", time_text(t.optimizer),
             share(t.optimizer));
  for (const std::string& text : {advice(p, deck), memory})
    if (!text.empty()) fmt::print("advice: {}\n", text);
  const double all = run_seconds(p, deck);
  fmt::print("all {}: {} on {}, {:.4g} {}-hours, without saves and restarts\n",
             counted(deck.train.steps, "step"), time_text(all), counted(p.ranks, "rank"),
             all * p.ranks / 3600, p.machine.device == DeviceKind::cuda ? "GPU" : "rank");
  fmt::print(
      "communication: {} sent by a rank and step, {} in all ({} in one flat ring, {} "
      "hierarchically)\n",
      bytes_text(p.bytes_sent), time_text(t.reduce + t.gather), time_text(p.flat_seconds),
      time_text(p.hierarchical_seconds));
  fmt::print("efficiency against one rank alone:");
  for (const auto& [ranks, e] : p.efficiency) fmt::print("  {}: {:.1f} %", ranks, 100 * e);
  if (std::ranges::any_of(p.efficiency, [](const auto& e) { return e.second > 1.0005; }))
    fmt::print("\n{}", above_one_rank);
  fmt::print(
      "\n  (ranks of equal speed; if their times vary by 1 %, 2 %: {:.1f} %, {:.1f} % of that at "
      "{})\n",
      100 * efficiency_of_variation(0.01, p.ranks), 100 * efficiency_of_variation(0.02, p.ranks),
      p.ranks);
  fmt::print("data: {}/s from storage{}\n", bytes_text(p.data_bandwidth),
             deck.data.text_features.empty() ? ", clips alone" : ", with captions of full length");
  fmt::print("checkpoint: {}, {} a rank; stall {}, written in {} at {}/s; save every {} ({})\n",
             bytes_text(p.checkpoint_bytes), bytes_text(p.checkpoint_bytes / p.ranks),
             time_text(p.checkpoint_stall), time_text(p.checkpoint_write),
             bytes_text(p.machine.storage_bandwidth), time_text(p.checkpoint_interval),
             p.checkpoint_interval > p.young_daly
                 ? fmt::format("Young, Daly: {}, which is too often", time_text(p.young_daly))
                 : "Young, Daly");
  const double disk = static_cast<double>(deck.train.keep + 1) * p.checkpoint_bytes;
  const std::optional<std::uint64_t> left = checkpoint::free_space(deck.run.dir);
  fmt::print(
      "disk: {} in run.dir = {}, for train.keep = {} and one that is being written{}\n",
      bytes_text(disk), deck.run.dir, deck.train.keep,
      !left ? std::string()
            : fmt::format("; {}{} left there", static_cast<double>(*left) < disk ? "only " : "",
                          bytes_text(static_cast<double>(*left))));
}

// What the run costs on GPUs of that kind.
void print_cost(const Plan& p, const Deck& deck, const Gpu& gpu) {
  const double all = run_seconds(p, deck);
  fmt::print("cost of train.steps = {} on {} x {}: {} a step, {:.4g} days, {:.4g} GPU-hours ({})\n",
             deck.train.steps, p.ranks, gpu.title, time_text(p.seconds), all / 86400,
             all * p.ranks / 3600,
             gpu.measured ? "rates of one GPU are measured, links between GPUs are not"
                          : "scaled, not measured");
}

nlohmann::ordered_json to_json(const Plan& p, const Deck& deck, const PlanRequest& request,
                               const std::string& memory) {
  nlohmann::ordered_json j;
  j["build"] = version_line();
  j["fabric"] = p.machine.name;
  j["ranks"] = p.ranks;
  j["ranks_a_node"] = p.machine.ranks_a_node;
  j["rates"] = p.rates_origin;
  j["parameters"] = {{"all", p.parameters}, {"trained", p.trained}};
  j["memory"] = {{"weights", p.memory.weights}, {"masters", p.memory.masters},
                 {"fixed", p.memory.fixed},     {"gradients", p.memory.gradients},
                 {"moments", p.memory.moments}, {"ema", p.memory.ema},
                 {"samples", p.memory.samples}, {"activations", p.memory.activations},
                 {"staging", p.memory.staging}, {"reserve", p.memory.reserve},
                 {"capacity", p.capacity}};
  for (const BucketPlan& b : p.buckets)
    j["buckets"].push_back({{"name", b.name},
                            {"clips", b.batch},
                            {"tokens", b.tokens},
                            {"memory", b.memory.bytes},
                            {"recompute", b.memory.recompute},
                            {"kept", b.memory.kept},
                            {"seconds", b.cost.seconds()},
                            {"forward", b.cost.forward},
                            {"backward", b.cost.backward},
                            {"again", b.cost.again},
                            {"exchange", b.cost.exchange},
                            {"flops", b.cost.flops},
                            {"share", b.share},
                            {"equal_cost_clips", b.equal_cost_batch}});
  for (const BucketSchedule& b : p.schedule)
    j["gradient_buckets"].push_back(
        {{"elements", b.elements}, {"ready", b.ready}, {"needed", b.needed}});
  j["step"] = {{"micro_batches", deck.train.micro_batches},
               {"seconds", p.seconds},
               {"compute", p.step.compute},
               {"exposed_reduce", p.step.exposed_reduce},
               {"exposed_gather", p.step.exposed_gather},
               {"optimizer", p.step.optimizer},
               {"imbalance", p.imbalance},
               {"tokens", p.tokens_a_step},
               {"flops", p.flops_a_step}};
  j["run"] = {{"steps", deck.train.steps},
              {"seconds", run_seconds(p, deck)},
              {"days", run_seconds(p, deck) / 86400},
              {"rank_hours", run_seconds(p, deck) * p.ranks / 3600}};
  if (p.machine.device == DeviceKind::cuda) j["run"]["gpu_hours"] = j["run"]["rank_hours"];
  if (!request.gpu.empty())
    j["gpu"] = {{"name", request.gpu}, {"measured", find_gpu(request.gpu).measured}};
  if (const std::string text = advice(p, deck); !text.empty()) j["advice"] = text;
  if (!memory.empty()) j["memory_advice"] = memory;
  j["communication"] = {{"bytes_sent", p.bytes_sent},
                        {"seconds", p.step.reduce + p.step.gather},
                        {"flat", p.flat_seconds},
                        {"hierarchical", p.hierarchical_seconds},
                        {"link_bandwidth", p.machine.link_bandwidth},
                        {"node_bandwidth", p.machine.node_bandwidth()}};
  for (const auto& [ranks, e] : p.efficiency)
    j["efficiency"].push_back({{"ranks", ranks}, {"share", e}});
  j["data_bandwidth"] = p.data_bandwidth;
  j["checkpoint"] = {{"bytes", p.checkpoint_bytes},
                     {"stall", p.checkpoint_stall},
                     {"write", p.checkpoint_write},
                     {"interval", p.checkpoint_interval},
                     {"young_daly", p.young_daly}};
  j["batch_sizes"] = batch_sizes_line(p);
  return j;
}

struct PlanCommand {
  PlanRequest request;
  std::string json;           // file for everything that was found
  std::string job = "train";  // or encode, generate, animate
  std::string wall;           // of a job; empty: not asked
};

// Collective. Prints the tables on the first rank; 0, or throws Exit::usage for what does not fit.
int plan(Deck deck, PlanCommand command, MPI_Comm world) {
  if (deck.train.more_steps > 0) deck.train.steps = deck.train.more_steps;  // those of "+N"
  int rank = 0, ranks = 1;
  MPI_Comm_rank(world, &rank);
  MPI_Comm_size(world, &ranks);
  PlanRequest& request = command.request;
  request.complete();
  const double wall = command.wall.empty() ? 0 : wall_seconds(command.wall);
  const bool train = command.job == "train",
             described = request.gpus > 0 || request.memory_gb > 0 || request.per_node > 0;
  WEFT_CHECK(train || wall == 0, Exit::usage, "leave --wall out",
             "--wall counts the jobs of a training, and --job is {}", command.job);
  if (request.fabric.empty())
    request.fabric = train && !described ? "local" : request.default_fabric();
  // Rank 0 alone plans a described machine; measuring takes all ranks.
  if (rank != 0 && (!train || request.fabric != "local")) return 0;
  if (!train) return plan_job(deck, request, command.job, command.json, ranks);
  const Plan p = make_plan(deck, request, world);
  if (rank != 0) return 0;

  fmt::print("{}\n{}: {} parameters, {} trained\n", version_line(), p.model, p.parameters,
             p.trained);
  fmt::print("{} on {} of {}, fabric {}\nrates: {}\n", counted(p.ranks, "rank"),
             counted(CommModel{p.ranks, p.machine}.nodes(), "node"), p.machine.ranks_a_node,
             p.machine.name, p.rates_origin);
  print_memory(p);
  print_buckets(p);
  const std::string memory = memory_advice(p, deck, request);
  print_step(p, deck, memory);
  if (!request.gpu.empty()) print_cost(p, deck, find_gpu(request.gpu));
  std::optional<JobChain> chain;
  if (wall > 0) print_jobs(chain.emplace(job_chain(p, deck, wall)), deck);
  if (std::ranges::any_of(p.buckets, [](const BucketPlan& b) { return b.equal_cost_batch > 0; }))
    fmt::print("\nfor micro-batches of equal cost:\n{}\n", batch_sizes_line(p));
  if (command.json.empty()) return 0;
  std::ofstream out(command.json, std::ios::trunc);
  nlohmann::ordered_json j = to_json(p, deck, request, memory);
  if (chain)
    j["jobs"] = {{"wall", chain->wall},
                 {"start", chain->start},
                 {"end", chain->end},
                 {"steps", chain->steps},
                 {"jobs", chain->jobs}};
  out << dump_json(j, 2) << "\n";
  out.close();
  WEFT_CHECK(bool(out), Exit::usage, "name a file in a folder that can be written",
             "cannot write {}", command.json);
  return 0;
}

}  // namespace

Command plan_command() {
  const auto r = std::make_shared<PlanCommand>();
  PlanRequest& planned = r->request;
  Command c{"plan", "predict memory, time and communication of the deck on a described machine",
            [r](const Deck& deck, MPI_Comm world) { return plan(deck, *r, world); }};
  c.takes_deck();
  c.option("--job", r->job, "train, encode, generate or animate").choices = {"train", "encode",
                                                                             "generate", "animate"};
  c.number("--gpus", planned.gpus, 1, 65536, "ranks (default: those it runs on)");
  planned.add_options(c);
  c.option(
      "--fabric", planned.fabric,
      "cards x Gb/s a node: 8x400, 1x200, ...; local measures this host (default of --job train "
      "where neither --gpus nor --memory is given, else a card of 400 Gb/s a GPU)");
  c.number("--mtbf", planned.mtbf_hours, 0.001, 1e9, "hours between failures of one device");
  c.option("--wall", r->wall, "time limit of a job (24h, 1-12:00:00): how many the training takes");
  c.path("--json", r->json, "file for the plan");
  return c;
}

}  // namespace weft
