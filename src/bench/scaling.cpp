// `weft bench scaling`: trainings on 1, 2, ... ranks of one job, all alive at once and one at work.
// First they are checked against each other, then timed in turn.
#include <fmt/chrono.h>
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>
#include <numeric>
#include <thread>

#include "bench/bench.h"
#include "core/clock.h"
#include "core/error.h"
#include "core/hash.h"
#include "core/host.h"
#include "core/json.h"
#include "core/log.h"
#include "core/mpi.h"
#include "data/clip_source.h"
#include "data/synthetic.h"
#include "models/registry.h"
#include "parallel/rank_device.h"
#include "report/report.h"
#include "tensor/device.h"
#include "train/trainer.h"

namespace weft {
namespace {

namespace fs = std::filesystem;

// 1. One training among several.

// Collective. Waits, mostly asleep, until every rank is here: idle ranks must not take processor
// time from those being timed. Ranks leave it within a fraction of a millisecond.
void meet(MPI_Comm world) {
  using namespace std::chrono_literals;
  // Two rounds: the first may be a long wait with long sleeps, which leaves the ranks up to 50 ms
  // apart; the second is short, with short sleeps, and brings them together.
  for (const auto longest : {50ms, 0ms}) {
    MPI_Request request;
    MPI_Ibarrier(world, &request);
    auto sleep = std::chrono::microseconds(200us);
    for (int done = 0; done == 0;) {
      MPI_Test(&request, &done, MPI_STATUS_IGNORE);
      if (done != 0) break;
      std::this_thread::sleep_for(sleep);
      sleep = std::min<std::chrono::microseconds>(
          sleep * 5 / 4, std::max<std::chrono::microseconds>(longest, 200us));
    }
  }
}

}  // namespace

ScratchFolder::ScratchFolder() {
  std::string name = (fs::temp_directory_path() / "weft_bench_XXXXXX").string();
  WEFT_CHECK(mkdtemp(name.data()) != nullptr, Exit::usage,
             "set TMPDIR to a directory that can be written", "cannot create {}", name);
  path_ = name;
}

void ScratchFolder::clear() {
  std::error_code ignored;
  fs::remove_all(path_, ignored);
}

namespace {

// Seconds of a step in one round: the step itself, and of it the mean over ranks that communication
// left exposed and that was spent waiting for the slowest.
struct ScalingRound {
  double seconds = 0, exposed = 0, wait = 0;
};

struct ScalingPoint {
  int ranks = 1;
  std::vector<ScalingRound> rounds;
  std::vector<ScalingRound> without_overlap;  // empty: not measured

  // Medians over rounds. Ratios are taken within a round, so that what the machine did to all of it
  // cancels out.
  double seconds = 0, exposed = 0, wait = 0, speedup = 0, efficiency = 0;
  double seconds_without_overlap = 0, exposed_without_overlap = 0;
};

struct ScalingResult {
  std::string mode, mix;
  std::string hardware;
  int threads = 1;  // a rank
  int steps = 0, warmup = 0;
  std::int64_t micro_batches = 0;  // of the deck
  std::vector<std::string> buckets;
  // Greatest relative difference of a loss from that of the first rank count, and of the weights as
  // a share of the update.
  int checked_steps = 0;
  double loss_difference = 0, weight_difference = 0;
  std::vector<ScalingPoint> points;
  std::string deck;  // as it was used, TOML
};

// How a training of the bench is made up.
struct ContenderSetup {
  int ranks = 1;
  bool overlap = true;
};

// A training on the first ranks of the world; the others hold an empty one.
class Contender {
 public:
  // Collective over `world`.
  Contender(Deck deck, const ContenderSetup& setup, std::int64_t micro_batches, std::int64_t steps,
            const ScratchFolder& scratch, MPI_Comm world);
  ~Contender();
  Contender(const Contender&) = delete;
  Contender& operator=(const Contender&) = delete;

  // Steps; their metrics as this rank sees them. Nothing on ranks that are left out. Afterwards no
  // part of the training is still running.
  std::vector<StepMetrics> run(std::int64_t steps);
  // All weights as the model uses them, one after the other; none on ranks that are left out.
  std::vector<float> weights();
  // Whether all of its ranks hold the same bits. True on ranks that are left out.
  bool same_on_all(const std::vector<float>& values) const;

 private:
  void settle();  // waits for weights in flight from the ranks that updated them

  MPI_Comm comm_ = MPI_COMM_NULL;
  std::unique_ptr<Trainer> trainer_;
};

Contender::Contender(Deck deck, const ContenderSetup& setup, std::int64_t micro_batches,
                     std::int64_t steps, const ScratchFolder& scratch, MPI_Comm world) {
  int rank = 0;
  MPI_Comm_rank(world, &rank);
  const bool in = rank < setup.ranks;
  MPI_Comm_split(world, in ? 0 : MPI_UNDEFINED, rank, &comm_);
  static int number = 0;
  deck.run.dir = (scratch.path() / std::to_string(number++)).string();
  deck.train.micro_batches = micro_batches;
  deck.train.steps = steps;
  deck.parallel.overlap = setup.overlap;
  meet(world);
  if (in) {
    trainer_ = std::make_unique<Trainer>(deck, make_task, comm_);
    trainer_->start();
  }
  meet(world);
}

Contender::~Contender() {
  trainer_.reset();
  // Freeing is collective: not while this rank alone may be unwinding.
  if (comm_ != MPI_COMM_NULL && std::uncaught_exceptions() == 0) MPI_Comm_free(&comm_);
}

std::vector<StepMetrics> Contender::run(std::int64_t steps) {
  std::vector<StepMetrics> all;
  for (std::int64_t i = 0; trainer_ && i < steps; ++i) {
    trainer_->step();
    for (StepMetrics& m : trainer_->finished(i + 1 == steps)) all.push_back(std::move(m));
  }
  const double start = now_seconds();
  settle();
  // The last step's weights would have travelled under the next forward, and taken processor time
  // from it. The first step here had none to share with, so their time is added to the last.
  if (!all.empty() && !on_cuda()) all.back().seconds += now_seconds() - start;
  return all;
}

void Contender::settle() {
  if (!trainer_) return;
  ParameterTable& params = trainer_->params();
  for (const auto& p : params.all()) params.await(*p);
}

std::vector<float> Contender::weights() {
  std::vector<float> all;
  if (!trainer_) return all;
  ParameterTable& params = trainer_->params();
  for (const auto& p : params.all()) {
    const Tensor on_host = (p->working.defined() ? p->working : p->value).to_host();
    for (std::int64_t i = 0; i < on_host.numel(); ++i)
      all.push_back(on_host.dtype() == DType::bf16 ? static_cast<float>(on_host.data<bf16>()[i])
                                                   : on_host.data<float>()[i]);
  }
  return all;
}

bool Contender::same_on_all(const std::vector<float>& values) const {
  if (comm_ == MPI_COMM_NULL) return true;
  const Hash128 hash = hash128(std::as_bytes(std::span(values)));
  Hash128 first = hash;
  MPI_Bcast(&first, sizeof first, MPI_BYTE, 0, comm_);
  int same = hash == first ? 1 : 0;
  MPI_Allreduce(MPI_IN_PLACE, &same, 1, MPI_INT, MPI_MIN, comm_);
  return same == 1;
}

// Collective over `world`. What the next `steps` of `contender` take: means over its ranks, on rank
// 0 of the world. The step is the median of them where `by_median`, else their mean.
ScalingRound time_round(Contender& contender, std::int64_t steps, bool by_median, MPI_Comm world) {
  meet(world);
  const std::vector<StepMetrics> metrics = contender.run(steps);
  double sums[3] = {};
  int in = metrics.empty() ? 0 : 1, ranks = 0;
  if (in == 1) {
    std::vector<double> seconds;
    for (const StepMetrics& m : metrics) {
      seconds.push_back(m.seconds);
      sums[1] += m.split.comm_exposed / static_cast<double>(metrics.size());
      sums[2] += m.split.wait_slowest / static_cast<double>(metrics.size());
    }
    // Steps of one kind: the median leaves out those that the machine disturbed. Steps of several
    // kinds: the mean counts all.
    sums[0] = by_median ? upper_median(seconds)
                        : std::accumulate(seconds.begin(), seconds.end(), 0.0) /
                              static_cast<double>(seconds.size());
  }
  meet(world);
  double all[3] = {};
  MPI_Reduce(sums, all, 3, MPI_DOUBLE, MPI_SUM, 0, world);
  MPI_Reduce(&in, &ranks, 1, MPI_INT, MPI_SUM, 0, world);
  ranks = std::max(ranks, 1);
  return {all[0] / ranks, all[1] / ranks, all[2] / ranks};
}

// 2. What runs, and whether all compute the same.

constexpr int checked_steps = 3;

std::vector<int> rank_counts(std::vector<int> wanted, int world) {
  if (wanted.empty()) {
    for (int n = 1; n < world; n *= 2) wanted.push_back(n);
    wanted.push_back(world);
  }
  std::sort(wanted.begin(), wanted.end());
  wanted.erase(std::unique(wanted.begin(), wanted.end()), wanted.end());
  WEFT_CHECK(wanted.front() >= 1 && wanted.back() <= world, Exit::usage,
             "start as many ranks as the greatest count: mpirun -n N weft bench scaling ...",
             "--ranks {} in a job of {} ranks", fmt::join(wanted, ","), world);
  return wanted;
}

// Leaves the largest bucket alone: the part of a synthetic source with the most values a clip.
void make_uniform(Deck& deck) {
  const std::vector<Bucket> buckets = open_clip_source(deck.data, deck.media)->buckets();
  if (buckets.size() < 2) return;
  WEFT_CHECK(is_synthetic(deck.data.path), Exit::usage,
             "use --mix mixed, or data.path=\"synthetic:...\" with clips of the shape that matters",
             "--mix uniform: {} has {} buckets, but a store can only be used completely",
             deck.data.path, buckets.size());
  std::vector<std::string> parts = {""};
  for (const char c : deck.data.path.substr(synthetic_prefix.size()))
    if (c == ';')
      parts.emplace_back();
    else
      parts.back() += c;
  WEFT_ASSERT(parts.size() == buckets.size());
  const auto largest = std::max_element(
      buckets.begin(), buckets.end(),
      [](const Bucket& a, const Bucket& b) { return a.clip_bytes() < b.clip_bytes(); });
  deck.data.path = std::string(synthetic_prefix) + parts[largest - buckets.begin()];
  // Entries for the buckets left out go too: they would name no bucket.
  std::erase_if(deck.train.batch_sizes, [&](const std::string& entry) {
    const std::string name = entry.substr(0, entry.find('='));
    return largest->name != name && !largest->name.starts_with(name + "-");
  });
}

// The deck as every contender uses it.
Deck bench_deck(Deck deck, const BenchScalingRequest& request, int threads) {
  if (request.mix == "uniform") make_uniform(deck);
  deck.run.threads = threads;  // as many a rank at every rank count
  if (!on_cuda()) deck.device.kind = "cpu";
  deck.run.resume = false;
  deck.run.trace = false;
  deck.train.checkpoint_every = 0;
  deck.parallel.hang_timeout = 3600;  // a training that waits for its turn is not hung
  return deck;
}

// As many steps as `least` or a few more, so that every rank count can train on the same samples.
std::int64_t whole_steps(std::int64_t least, const std::vector<int>& counts, bool weak) {
  const auto divides = [&](std::int64_t steps) {
    return std::all_of(counts.begin(), counts.end(),
                       [&](int n) { return steps * counts.back() % n == 0; });
  };
  while (weak && !divides(least)) ++least;
  return least;
}

// Trains a few steps on the same samples at every rank count, with and without overlap, and
// compares losses and weights with those of the first. What is wrong, on every rank; "" if they
// agree.
std::string check_agreement(Deck deck, const std::vector<ContenderSetup>& setups,
                            std::int64_t micro_batches, const ScratchFolder& scratch,
                            MPI_Comm world, ScalingResult& result) {
  // A rank count changes the order of sums and nothing else: gradients differ by about 1e-6 of
  // their size in f32, and by 2^-8 with bf16 numbers in the model or on the wire. AdamW as decks
  // have it would hide that in noise, since it divides even a gradient that is all rounding by its
  // own size. With eps = 1 an update is as large as its (clipped) gradient.
  deck.train.lr = deck.train.adam_eps = 1;
  deck.train.grad_clip = 1;
  deck.train.weight_decay = 0;
  deck.train.warmup_steps = 0;
  const bool coarse = deck.model.dtype != "f32" || deck.parallel.wire != "f32";
  const double loss_bound = coarse ? 1.0 / 256 : 1e-5, weight_bound = coarse ? 0.25 : 1e-4;
  std::vector<float> start, first;
  std::vector<double> first_losses;
  std::string wrong;
  for (const ContenderSetup& setup : setups) {
    Contender contender(deck, setup, micro_batches, checked_steps, scratch, world);
    if (start.empty()) start = contender.weights();
    std::vector<double> losses;
    for (const StepMetrics& m : contender.run(checked_steps)) losses.push_back(m.loss);
    const std::vector<float> weights = contender.weights();
    const bool replicas = contender.same_on_all(weights);
    meet(world);
    if (log::rank() != 0) continue;
    const std::string who =
        fmt::format("{}{}", counted(setup.ranks, "rank"), setup.overlap ? "" : " without overlap");
    if (!replicas)
      wrong = fmt::format("{}: after {} steps not all of them hold the same weights", who,
                          checked_steps);
    if (first.empty()) {
      first = weights;
      first_losses = losses;
      continue;
    }
    double loss = 0, distance = 0, update = 0;
    for (std::size_t i = 0; i < losses.size(); ++i)
      loss = std::max(loss, std::abs(losses[i] - first_losses[i]) / std::abs(first_losses[i]));
    for (std::size_t i = 0; i < weights.size(); ++i) {
      const double d = weights[i] - first[i], u = first[i] - start[i];
      distance += d * d;
      update += u * u;
    }
    const double share = distance == 0 ? 0 : std::sqrt(distance / update);
    result.loss_difference = std::max(result.loss_difference, loss);
    result.weight_difference = std::max(result.weight_difference, share);
    // Negated, so that NaN counts as wrong.
    if (!(loss <= loss_bound && share <= weight_bound))
      wrong = fmt::format(
          "{} do not compute what {} do: after {} steps losses differ by {:.1e} (bound {:.1e}), "
          "weights by {:.1e} of the update (bound {:.1e})",
          who, setups.front().ranks, checked_steps, loss, loss_bound, share, weight_bound);
  }
  result.checked_steps = checked_steps;
  int bad = wrong.empty() ? 0 : 1;  // rank 0 knows
  MPI_Bcast(&bad, 1, MPI_INT, 0, world);
  if (bad == 1 && wrong.empty()) wrong = "rank counts do not compute the same";
  return wrong;
}

// 3. The results as a table, as JSON and as a plot.

template <class F>
double median_of(const std::vector<ScalingRound>& rounds, F&& value) {
  std::vector<double> v;
  for (const ScalingRound& r : rounds) v.push_back(value(r));
  return median(v);
}

std::string commit() {
  const std::string line = version_line(), mark = "commit ";
  const std::size_t at = line.find(mark);
  if (at == std::string::npos) return "unknown";
  return line.substr(at + mark.size(), line.find_first_of(",)", at) - at - mark.size());
}

std::string share(double part, double whole) {
  return fmt::format("{:.1f} ms {:>4.1f} %", 1e3 * part, whole > 0 ? 100 * part / whole : 0);
}

nlohmann::ordered_json rounds_json(const std::vector<ScalingRound>& rounds) {
  auto list = nlohmann::ordered_json::array();
  for (const ScalingRound& r : rounds)
    list.push_back({{"seconds", r.seconds}, {"exposed", r.exposed}, {"wait", r.wait}});
  return list;
}

// Fills in what follows from the rounds; the first point is what the others are compared with.
void summarise(ScalingResult& result) {
  const ScalingPoint& first = result.points.front();
  for (ScalingPoint& p : result.points) {
    const auto seconds = [](const ScalingRound& r) { return r.seconds; };
    const auto exposed = [](const ScalingRound& r) { return r.exposed; };
    p.seconds = median_of(p.rounds, seconds);
    p.exposed = median_of(p.rounds, exposed);
    p.wait = median_of(p.rounds, [](const ScalingRound& r) { return r.wait; });
    p.seconds_without_overlap = median_of(p.without_overlap, seconds);
    p.exposed_without_overlap = median_of(p.without_overlap, exposed);
    const double more = static_cast<double>(p.ranks) / first.ranks;
    std::vector<double> ratios;
    for (std::size_t r = 0; r < p.rounds.size(); ++r)
      ratios.push_back(first.rounds[r].seconds / p.rounds[r].seconds);
    p.speedup = median(ratios) * (result.mode == "weak" ? more : 1);
    p.efficiency = p.speedup / more;
  }
}

std::string scaling_table(const ScalingResult& result) {
  std::string text = fmt::format("{}\n{}, {} a rank; {} scaling, {} ({}), {} a step{}\n",
                                 version_line(), result.hardware, counted(result.threads, "thread"),
                                 result.mode, result.mix, fmt::join(result.buckets, ", "),
                                 counted(result.micro_batches, "micro-batch", "micro-batches"),
                                 result.mode == "weak" ? " and rank" : "");
  text += fmt::format(
      "all rank counts compute the same: over {} steps losses differ by {:.1e}, weights by {:.1e} "
      "of "
      "the update\n",
      result.checked_steps, result.loss_difference, result.weight_difference);
  text += fmt::format("{:>6} {:>11} {:>9} {:>11} {:>19} {:>19}\n", "ranks", "s a step", "speed-up",
                      "efficiency", "exposed", "for the slowest");
  for (const ScalingPoint& p : result.points) {
    text += fmt::format("{:>6} {:>11.4f} {:>9.3f} {:>9.1f} % {:>19} {:>19}\n", p.ranks, p.seconds,
                        p.speedup, 100 * p.efficiency, share(p.exposed, p.seconds),
                        share(p.wait, p.seconds));
    if (!p.without_overlap.empty())
      text += fmt::format("{:>6} {:>11.4f} {:>9} {:>11} {:>19}   without overlap: {}\n", p.ranks,
                          p.seconds_without_overlap, "", "",
                          share(p.exposed_without_overlap, p.seconds_without_overlap),
                          p.exposed_without_overlap > 0
                              ? fmt::format("with it {:.0f} % of that is exposed",
                                            100 * p.exposed / p.exposed_without_overlap)
                              : "nothing exposed");
  }
  return text;
}

// The form for results in docs/bench_scaling.md, filled in.
std::string scaling_form(const ScalingResult& result, const std::string& date) {
  std::string text = fmt::format(
      "| | |\n|---|---|\n| hardware | {} |\n| nodes, interconnect | |\n| weft | {} |\n"
      "| MPI | {} |\n| driver, CUDA, NCCL | |\n| deck, changed keys | |\n"
      "| {} scaling, {} buckets | {}, {} a rank |\n| date | {} |\n\n"
      "| ranks | seconds a step | speed-up | efficiency | exposed | for the slowest |\n"
      "|---|---|---|---|---|---|\n",
      result.hardware, version_line(), mpi_library(), result.mode, result.mix,
      counted(result.micro_batches, "micro-batch", "micro-batches"),
      counted(result.threads, "thread"), date);
  for (const ScalingPoint& p : result.points)
    text += fmt::format("| {} | {:.4f} | {:.3f} | {:.1f} % | {} | {} |\n", p.ranks, p.seconds,
                        p.speedup, 100 * p.efficiency, share(p.exposed, p.seconds),
                        share(p.wait, p.seconds));
  return text;
}

std::string scaling_json(const ScalingResult& result) {
  nlohmann::ordered_json j{
      {"schema", "weft-scaling-1"},
      {"mode", result.mode},
      {"mix", result.mix},
      {"build", version_line()},
      {"commit", commit()},
      {"date", fmt::format("{:%Y-%m-%dT%H:%M:%SZ}", fmt::gmtime(std::time(nullptr)))},
      {"hardware", result.hardware},
      {"threads", result.threads},
      {"steps", result.steps},
      {"warmup", result.warmup},
      {"micro_batches", result.micro_batches},
      {"buckets", result.buckets}};
  j["agreement"] = {{"steps", result.checked_steps},
                    {"loss", result.loss_difference},
                    {"weights", result.weight_difference}};
  j["points"] = nlohmann::ordered_json::array();
  for (const ScalingPoint& p : result.points) {
    nlohmann::ordered_json point{{"ranks", p.ranks},
                                 {"seconds", p.seconds},
                                 {"speedup", p.speedup},
                                 {"efficiency", p.efficiency},
                                 {"exposed", p.exposed},
                                 {"wait", p.wait},
                                 {"rounds", rounds_json(p.rounds)}};
    if (!p.without_overlap.empty())
      point["without_overlap"] = {{"seconds", p.seconds_without_overlap},
                                  {"exposed", p.exposed_without_overlap},
                                  {"rounds", rounds_json(p.without_overlap)}};
    j["points"].push_back(std::move(point));
  }
  j["deck"] = result.deck;
  j["form"] = scaling_form(result, j["date"]);
  return dump_json(j, 1, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n";
}

// Rank 0. An existing file keeps its content until there is a result: an empty `text` only checks
// that the file can be written.
void write_text(const std::string& path, const std::string& text) {
  if (path.empty()) return;
  std::ofstream out(path, text.empty() ? std::ios::app : std::ios::binary);
  out << text;
  out.close();
  WEFT_CHECK(bool(out), Exit::usage, "name a file that can be written", "cannot write {}", path);
}

}  // namespace

int bench_scaling(const Deck& given, const BenchScalingRequest& request, MPI_Comm world) {
  WEFT_CHECK(request.plot.empty() || request.plot.ends_with(".html"), Exit::usage,
             "give it a name that ends in .html", "--plot {} would be a page", request.plot);
  if (log::rank() == 0)
    for (const std::string& path : {request.json, request.plot}) write_text(path, "");
  int world_size = 1;
  MPI_Comm_size(world, &world_size);
  const bool weak = request.mode == "weak";

  // 1. What runs: every rank count, without overlap too if that is asked for.
  const std::vector<int> counts = rank_counts(request.ranks, world_size);
  const auto whole = [&](int n) { return n % given.parallel.sp == 0; };
  WEFT_CHECK(std::all_of(counts.begin(), counts.end(), whole), Exit::usage,
             "name rank counts that parallel.sp divides: --ranks",
             "--ranks {} with parallel.sp = {}", fmt::join(counts, ","), given.parallel.sp);
  const RankDevice device = choose_device(given.device.kind, given.device.share, world);
  const int threads = set_threads(static_cast<int>(given.run.threads), device.core_sharers);
  const Deck deck = bench_deck(given, request, threads);
  std::vector<ContenderSetup> setups;
  for (const int n : counts) {
    setups.push_back({n, true});
    if (n > 1 && request.no_overlap) setups.push_back({n, false});
  }
  const std::int64_t each = deck.train.micro_batches, most = counts.back();
  ScratchFolder scratch;

  // 2. All compute the same.
  ScalingResult result;
  const std::string wrong =
      check_agreement(deck, setups, weak ? each * most : each, scratch, world, result);
  if (!wrong.empty()) {
    scratch.clear();
    meet(world);  // the first rank to end ends all
    throw Error(
        Exit::hardware, wrong,
        "run weft doctor and weft bench comm on these nodes; if both are well, this is a bug "
        "in weft",
        __FILE__, __LINE__);
  }

  // 3. All are timed, in turn. Every training stays alive through all rounds, so that each warms up
  // only once.
  const std::int64_t warmup = whole_steps(request.warmup, counts, weak);
  const std::int64_t steps = whole_steps(request.steps, counts, weak);
  std::vector<std::unique_ptr<Contender>> contenders;
  std::vector<std::int64_t> times;  // steps of each for one of the greatest rank count
  for (const ContenderSetup& s : setups) {
    const std::int64_t used = s.ranks;
    // Weak: fewer ranks take more steps, so that every rank count trains on the same samples.
    times.push_back(weak ? most : used);
    const std::int64_t total = (warmup + steps * request.rounds) * times.back() / used;
    contenders.push_back(
        std::make_unique<Contender>(deck, s, weak ? each * used : each, total, scratch, world));
    contenders.back()->run(warmup * times.back() / used);
    times.back() = steps * times.back() / used;
    meet(world);
  }
  const std::vector<Bucket> buckets = open_clip_source(deck.data, deck.media)->buckets();
  std::vector<std::vector<ScalingRound>> rounds(setups.size());
  for (int r = 0; r < request.rounds; ++r) {
    if (request.paced && log::rank() == 0) {
      fmt::print("round {} of {} is ready\n", r + 1, request.rounds);
      std::fflush(stdout);
      std::string line;
      std::getline(std::cin, line);
    }
    meet(world);
    // A different one begins each round, so that none always follows the same one.
    for (std::size_t i = 0; i < setups.size(); ++i) {
      const std::size_t c = (i + static_cast<std::size_t>(r)) % setups.size();
      rounds[c].push_back(time_round(*contenders[c], times[c], buckets.size() == 1, world));
    }
  }

  // 4. The results.
  for (std::size_t c = 0; c < setups.size(); ++c) {
    if (setups[c].overlap) {
      result.points.emplace_back();
      result.points.back().ranks = setups[c].ranks;
      result.points.back().rounds = rounds[c];
    } else {
      result.points.back().without_overlap = rounds[c];
    }
  }
  result.mode = request.mode;
  result.mix = request.mix;
  result.hardware = on_cuda() ? device_runtime().describe() : describe_cpu();
  result.threads = threads;
  result.steps = static_cast<int>(steps);
  result.warmup = static_cast<int>(warmup);
  result.micro_batches = each;
  for (const Bucket& b : buckets) result.buckets.push_back(b.name);
  result.deck = to_toml(deck);
  if (log::rank() == 0) {
    summarise(result);
    fmt::print("{}", scaling_table(result));
    write_text(request.json, scaling_json(result));
    if (!request.plot.empty())
      write_text(request.plot,
                 report_page::make_page(
                     {}, std::vector{parse_json<nlohmann::ordered_json>(scaling_json(result))}));
  }
  meet(world);
  return 0;
}

Command bench_scaling_command() {
  const auto r = std::make_shared<BenchScalingRequest>();
  Command c{"scaling",
            "training on 1, 2, ... ranks in one job: checked against each other, then timed",
            [r](const Deck& deck, MPI_Comm world) { return bench_scaling(deck, *r, world); }};
  c.takes_deck();
  c.number("--ranks", r->ranks, 1, 1e6,
           "rank counts, such as 1,2,4 (default: 1, 2, 4, ... and all)")
      .commas = true;
  c.option("--mode", r->mode, "weak: constant work per rank; strong: constant work in total")
      .choices = {"weak", "strong"};
  c.option("--mix", r->mix, "mixed: the deck's buckets; uniform: only the largest").choices = {
      "uniform", "mixed"};
  c.number("--steps", r->steps, 1, 1e6, "timed steps per round at the largest rank count");
  c.number("--warmup", r->warmup, 1, 1e6, "steps before them");
  c.number("--rounds", r->rounds, 1, 1e6, "rounds; results are medians over them");
  c.option("--no-overlap", r->no_overlap, "also with parallel.overlap = false");
  c.option("--paced", r->paced, "wait for a line on stdin before each round");
  c.path("--json", r->json, "file for the results (scaling.json)");
  c.path("--plot", r->plot, "file for a page with the plot (.html)");
  return c;
}

}  // namespace weft
