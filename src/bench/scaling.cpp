#include "bench/bench.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <iostream>
#include <memory>

#include "bench/scaling_contender.h"
#include "core/error.h"
#include "core/log.h"
#include "data/clip_source.h"
#include "data/synthetic.h"
#include "parallel/rank_device.h"
#include "tensor/device.h"

namespace weft {
namespace {

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
             "--mix uniform: {} has {} buckets, and a store is used whole", deck.data.path,
             buckets.size());
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
  deck.data.path =
      std::string(synthetic_prefix) + parts[static_cast<std::size_t>(largest - buckets.begin())];
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
                            std::int64_t micro_batches, const Scratch& scratch, MPI_Comm world,
                            ScalingResult& result) {
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
    if (setup.alone) continue;
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
  WEFT_CHECK(request.steps >= 1 && request.rounds >= 1 && request.warmup >= 1, Exit::usage,
             "--steps, --rounds and --warmup are at least 1", "{} steps, {} rounds, {} to warm up",
             request.steps, request.rounds, request.warmup);
  if (log::rank() == 0)
    for (const std::string& path : {request.json, request.plot}) write_text(path, "");
  int world_size = 1;
  MPI_Comm_size(world, &world_size);
  const bool weak = request.mode == "weak";

  // 1. What runs: every rank count, without overlap too if that is asked for, and independent
  // trainings.
  const std::vector<int> counts = rank_counts(request.ranks, world_size);
  const auto whole = [&](int n) { return n % given.parallel.sp == 0; };
  WEFT_CHECK(std::all_of(counts.begin(), counts.end(), whole), Exit::usage,
             "name rank counts that parallel.sp divides: --ranks",
             "--ranks {} with parallel.sp = {}", fmt::join(counts, ","), given.parallel.sp);
  const RankDevice device = choose_device(given.device.kind, given.device.share, world);
  const int threads = set_threads(static_cast<int>(given.run.threads), device.host_ranks);
  const Deck deck = bench_deck(given, request, threads);
  std::vector<ContenderSetup> setups;
  for (const int n : counts) {
    setups.push_back({n, true, false});
    if (n > 1 && request.no_overlap) setups.push_back({n, false, false});
    // GPUs share no cores, caches or memory that independent work could compete for. (Trainings of
    // one rank know no parallel.sp, which then is 1, since a count of 1 was named.)
    if (n > 1 && counts.front() == 1 && !on_cuda()) setups.push_back({n, true, true});
  }
  const std::int64_t each = deck.train.micro_batches, most = counts.back();
  Scratch scratch;

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
    const std::int64_t used = s.alone ? 1 : s.ranks;
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
    if (setups[c].overlap && !setups[c].alone) {
      result.points.emplace_back();
      result.points.back().ranks = setups[c].ranks;
      result.points.back().rounds = rounds[c];
    } else if (setups[c].alone) {
      for (const ScalingRound& round : rounds[c])
        result.points.back().side_by_side.push_back(round.seconds);
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
    if (!request.plot.empty()) write_text(request.plot, scaling_plot(result));
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
  c.option("--ranks", r->ranks, "rank counts, such as 1,2,4 (else 1, 2, 4, ... and all)").commas =
      true;
  c.option("--mode", r->mode, "weak: as much work a rank; strong: as much in all").choices = {
      "weak", "strong"};
  c.option("--mix", r->mix, "mixed: the deck's buckets; uniform: the largest alone").choices = {
      "uniform", "mixed"};
  c.option("--steps", r->steps, "timed steps a round at the greatest rank count");
  c.option("--warmup", r->warmup, "steps before them");
  c.option("--rounds", r->rounds, "rounds; medians over them count");
  c.option("--no-overlap", r->no_overlap, "also with parallel.overlap = false");
  c.option("--paced", r->paced, "before each round, wait for a line on stdin");
  c.option("--json", r->json, "file for the results (scaling.json)");
  c.option("--plot", r->plot, "file for a plot (SVG)");
  return c;
}

}  // namespace weft
