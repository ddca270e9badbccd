#include "train/metrics/run_facts.h"

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>
#include <optional>
#include <random>

#include "core/clock.h"
#include "core/error.h"
#include "core/file.h"
#include "core/hash.h"
#include "core/host.h"
#include "core/json.h"
#include "core/log.h"
#include "core/mpi.h"
#include "ops/dispatch.h"
#include "ops/rates.h"
#include "tensor/device.h"
#include "train/data_parallel.h"
#include "train/metrics/metrics.h"

namespace weft {

namespace fs = std::filesystem;

namespace {

// Null where it is not there, or damaged.
nlohmann::json stored_facts(const fs::path& run_dir) {
  const std::string text = content_of(run_dir / "run.json");
  nlohmann::json j = try_parse_json(text);
  return j.is_object() && seal_holds(text) ? j : nlohmann::json();
}

}  // namespace

std::string stored_run_id(const fs::path& run_dir) {
  const nlohmann::json j = stored_facts(run_dir);
  const auto id = j.find("id");
  return id != j.end() && id->is_string() ? id->get<std::string>() : "";
}

std::pair<std::int64_t, std::int64_t> stored_more_steps(const fs::path& run_dir) {
  const nlohmann::json j = stored_facts(run_dir);
  const auto more = j.find("more_steps");
  if (more == j.end() || !more->is_array() || more->size() != 2 ||
      !std::ranges::all_of(*more, [](const auto& n) { return n.is_number_integer(); }))
    return {0, 0};
  return {(*more)[0].get<std::int64_t>(), (*more)[1].get<std::int64_t>()};
}

std::string new_run_id() {
  std::random_device random;
  std::array<std::uint32_t, 4> bits{};
  for (std::uint32_t& b : bits) b = random();
  return to_hex(hash128(std::as_bytes(std::span(bits))));
}

namespace {

// `text` is sealed. The file before it is from the last start.
void write_text(const std::filesystem::path& path, const std::string& text) {
  if (!seal_holds(content_of(path)))
    log::warn("{} is damaged or was edited: it is rewritten", path.string());
  replace_file(path, text, Exit::checkpoint, Durable::no);
}

// Samples of an epoch of a mix, of one store or of all.
double samples_of_stores(std::span<const Bucket> buckets, std::optional<int> store) {
  double samples = 0;
  for (const Bucket& b : buckets)
    for (const Bucket::Part& p : b.parts)
      if (!store || p.store == *store) samples += p.samples;
  return samples;
}

// "75 % a.h5, 25 % b.h5"
std::string describe_mix(const ClipSource& source) {
  const std::vector<std::string> names = source.store_names();
  const double all = samples_of_stores(source.buckets(), {});
  std::string text;
  for (std::size_t s = 0; s < names.size(); ++s)
    text +=
        fmt::format("{}{:.4g} % {}", s == 0 ? "" : ", ",
                    100 * samples_of_stores(source.buckets(), static_cast<int>(s)) / all, names[s]);
  return text;
}

std::string describe_data(const DataDeck& data, const std::vector<Bucket>& buckets) {
  std::int64_t clips = 0;
  for (const Bucket& b : buckets) clips += b.clips;
  if (buckets.empty() || buckets.front().label_rate == 0)
    return fmt::format(
        "{}: {} in {}{}", data.path, counted(clips, "clip"), counted(std::ssize(buckets), "bucket"),
        buckets.empty() || buckets.front().parts.empty()
            ? std::string()
            : fmt::format(", {:.0f} samples an epoch", samples_of_stores(buckets, {})));
  if (buckets.front().holds_text())
    return fmt::format("{}: {} pictures with text, {} squares of {} pixels", data.path, clips,
                       data.augment ? "changed at random," : "scaled to", data.crop);
  // Each image is in one bucket for each short side.
  const auto sides = std::ssize(data.short_sides);
  return fmt::format("{}: {} at {} up to {}", data.path, counted(clips / sides, "image"),
                     counted(sides, "short side"), std::ranges::max(data.short_sides));
}

}  // namespace

RunFacts::RunFacts(const Deck& deck, Trainer& trainer) : deck_(deck), id_(trainer.run_id()) {
  ParameterTable& p = trainer.params();
  const Communicator& comm = trainer.communicator();
  memory_ = {
      {"weights", p.weight_bytes() + p.base_bytes(trainer.task().bf16())},
      {"gradients", p.gradient_bytes()},
      {"optimizer", trainer.state().bytes()},
      {"activations", trainer.planned_bytes()},
  };
  double state = 0;
  for (const auto& [kind, bytes] : memory_)
    if (kind != "activations") state += static_cast<double>(bytes);
  const auto& memory = trainer.memory();
  const auto recomputed = std::count_if(memory.begin(), memory.end(), [&](const StepMemory& m) {
    // Above what the deck asks for: for lack of memory.
    return m.recompute > trainer.task().least_recompute();
  });
  std::size_t kept = 0;
  for (const StepMemory& m : memory) kept = std::max(kept, m.kept);
  const std::int64_t sp = deck.parallel.sp;
  slowest_.resize(comm.size());
  rows_ = {
      {"build", version_line()},
      {"run", fmt::format("{} {}",
                          trainer.steps_done() == 0
                              ? "new in"
                              : fmt::format("resumes after step {} in", trainer.steps_done()),
                          fs::absolute(deck.run.dir).lexically_normal().string())},
      {"ranks", fmt::format("{} ({}), {} each, {}", comm.size(),
                            sp == 1 ? "data parallel"
                                    : fmt::format("{} of {} that share clips",
                                                  counted(comm.size() / sp, "group"), sp),
                            counted(trainer.threads(), "thread"), comm.describe())},
      {"device", on_cuda() ? device_runtime().describe() : describe_cpu()},
      {"model", fmt::format("{}, {} parameters ({} trained)", trainer.task().describe(),
                            p.total_elements(), p.trainable_elements())},
      {"weights", trainer.started_from()},
      {"data", describe_data(deck.data, trainer.source().buckets())},
      {"mix", describe_mix(trainer.source())},
      {"step",
       fmt::format("{}; {}", counted(deck.train.micro_batches, "micro-batch", "micro-batches"),
                   on_cuda() && !deck.parallel.deterministic
                       ? "restarts repeat their bits, another run does not (matrix "
                         "products are tuned; parallel.deterministic)"
                       : "runs and restarts on as many ranks repeat their bits")},
      {"gradients", fmt::format("{} (bucket_mib {:.4g}), {} on the wire{}{}",
                                counted(std::ssize(p.buckets()), "bucket"),
                                bucket_mib(deck.parallel, comm.size()), deck.parallel.wire,
                                trainer.state().sharded() ? ", optimizer state in shards" : "",
                                deck.parallel.overlap ? "" : ", without overlap")},
      {"memory",
       fmt::format("{} of state, {} of activations a rank (planned){}{}", size_text(state),
                   size_text(static_cast<double>(trainer.planned_bytes())),
                   kept == 0 ? std::string()
                             : fmt::format(", up to {} of them optional",
                                           size_text(static_cast<double>(kept))),
                   recomputed == 0 ? std::string()
                                   : fmt::format("; {} of {} recompute blocks", recomputed,
                                                 counted(std::ssize(memory), "bucket")))},
      {"kernels", on_cuda()
                      ? std::string("cuBLASLt matmul; weft CUDA for the rest")
                      : fmt::format(ops::products_by_onednn ? "oneDNN matmul; weft {} for the rest"
                                                            : "weft {}",
                                    ops::cpu_instructions())},
      {"ways", trainer.ways()},
  };
  const bool mixes = !trainer.source().store_names().empty();
  std::erase_if(rows_, [&](const auto& row) {
    return (row.first == "mix" && !mixes) || (row.first == "ways" && row.second.empty());
  });
}

void RunFacts::print() const {
  for (const auto& [name, value] : rows_) log::info("{:<9} {}", name, value);
}

void RunFacts::write(const std::filesystem::path& run_dir) const {
  write_text(run_dir / "deck.toml", seal_text(to_toml(deck_)));
  nlohmann::ordered_json j = {{"id", id_}};
  if (deck_.train.more_steps > 0) j["more_steps"] = {deck_.train.more_steps, deck_.train.steps};
  for (const auto& [name, value] : rows_) j[name] = value;
  for (const auto& [kind, bytes] : memory_) j["memory_plan"][kind] = bytes;
  write_text(run_dir / "run.json", seal_json(dump_json(j, 2)) + "\n");
}

void StepSums::add(const Values& step) {
  if (steps_ == span_ * static_cast<std::int64_t>(most)) {
    span_ *= 2;
    for (std::size_t i = 0; i < most; ++i) {
      if (i % 2 == 0) spans_[i / 2] = spans_[i];
      for (int v = 0; i % 2 == 1 && v < count; ++v) spans_[i / 2][v] += spans_[i][v];
    }
    spans_.resize(most / 2);
  }
  if (steps_ == span_ * std::ssize(spans_)) spans_.emplace_back();
  for (int v = 0; v < count; ++v) spans_.back()[v] += step[v];
  ++steps_;
}

std::pair<StepSums::Values, std::int64_t> StepSums::without_first_tenth() const {
  // Of two to ten steps the first.
  const std::int64_t tenth = steps_ < 2 ? 0 : (steps_ + 9) / 10, left_out = tenth / span_;
  Values sums{};
  for (auto s = static_cast<std::size_t>(left_out); s < spans_.size(); ++s)
    for (int v = 0; v < count; ++v) sums[v] += spans_[s][v];
  return {sums, left_out * span_};
}

void RunFacts::count(const StepMetrics& m) {
  seconds_.push_back(m.seconds);
  StepSums::Values v{};
  v[StepSums::seconds] = m.seconds;
  v[StepSums::samples] = static_cast<double>(m.samples.size());
  v[StepSums::flops] = m.flops;
  // A GPU's time of compute contains its wait for clips.
  v[StepSums::compute] =
      on_cuda() ? std::max(0.0, m.split.compute - m.split.data_wait) : m.split.compute;
  v[StepSums::data_wait] = m.split.data_wait;
  v[StepSums::comm_exposed] = m.split.comm_exposed;
  v[StepSums::wait_slowest] = m.split.wait_slowest;
  v[StepSums::optimizer] = m.split.optimizer;
  v[StepSums::checkpoint] = m.split.checkpoint;
  sums_.add(v);
  total_spread_ += m.spread;
  if (m.slowest_rank >= 0) ++slowest_[m.slowest_rank];
}

namespace {

// FLOP/s of a square matrix product in the model's type on this rank; 0 where the arena is too
// small for it, and on a GPU, where this has not been run yet.
double measured_limit(Trainer& trainer) {
  constexpr std::int64_t n = 1024;
  // Operands and results, and 4 bytes an element while they are drawn.
  if (on_cuda() || trainer.arena().capacity() < 32 * static_cast<std::size_t>(n * n)) return 0;
  const ArenaScope scope(trainer.arena());
  return product_rate(trainer.task().bf16() ? DType::bf16 : DType::f32,
                      {{StepProduct::Of::output, n, n, n, 1}}, 0.05);
}

}  // namespace

JobWork RunFacts::work(Trainer& trainer, MPI_Comm world) const {
  JobWork work;
  if (sums_.steps() == 0) return work;
  const auto [mine, left_out] = sums_.without_first_tenth();
  std::vector<double> sent(mine.begin(), mine.end());
  sent.push_back(measured_limit(trainer));
  const auto ranks = static_cast<std::size_t>(trainer.communicator().size());
  std::vector<double> all(ranks * sent.size());
  MPI_Gather(sent.data(), static_cast<int>(sent.size()), MPI_DOUBLE, all.data(),
             static_cast<int>(sent.size()), MPI_DOUBLE, 0, world);
  work.hosts = texts_of_ranks(host_name(), world);
  const auto of = [&](std::size_t rank, std::size_t v) { return all[rank * sent.size() + v]; };

  const auto& buckets = trainer.source().buckets();
  work.unit = buckets.empty() || buckets.front().label_rate == 0 ? "clip" : "picture";
  work.items = mine[StepSums::samples];
  work.seconds = mine[StepSums::seconds];
  work.note = fmt::format("{}, median {:.4f} s", counted(sums_.steps() - left_out, "step"),
                          upper_median(seconds_));
  if (left_out > 0) work.note += fmt::format("; the first {} left out", left_out);
  work.on_gpu = on_cuda();
  work.threads = trainer.threads();
  for (std::size_t r = 0; r < ranks; ++r) {
    work.flops += of(r, StepSums::flops);
    work.limit += of(r, StepSums::count);
  }
  const std::pair<const char*, StepSums::Of> parts[] = {
      {"compute", StepSums::compute},
      {"communication", StepSums::comm_exposed},
      {"wait for slowest", StepSums::wait_slowest},
      {"data", StepSums::data_wait},
      {"optimizer", StepSums::optimizer},
      {"checkpoint", StepSums::checkpoint}};
  for (const auto& [name, v] : parts) {
    auto& seconds = work.parts.emplace_back(name, std::vector<double>()).second;
    for (std::size_t r = 0; r < ranks; ++r) seconds.push_back(of(r, v));
  }
  return work;
}

void RunFacts::print_step(const StepMetrics& m, const std::string& left) const {
  log::info("{}{}", step_text(m, deck_.train.steps), left);
}

void RunFacts::print_end(const Trainer& trainer) const {
  if (!seconds_.empty()) {
    if (slowest_.size() > 1) {
      const auto worst = std::max_element(slowest_.begin(), slowest_.end());
      log::info(
          "ranks     spread of a step {:.1f} % on average; rank {} was the slowest in {} of {}",
          100 * total_spread_ / static_cast<double>(seconds_.size()), worst - slowest_.begin(),
          *worst, counted(std::ssize(seconds_), "step"));
    }
    if (const StepGraphs& graphs = trainer.graphs(); graphs.recorded() > 0)
      log::info("graphs    {} recorded, {} of {} micro-batches replayed", graphs.recorded(),
                graphs.replays(), graphs.runs());
    log::info("memory    {} of activations at the peak ({} planned), {} resident",
              size_text(static_cast<double>(trainer.arena().peak())),
              size_text(static_cast<double>(trainer.planned_bytes())),
              size_text(static_cast<double>(resident_bytes())));
  }
  if (trainer.saves_skipped() > 0)
    log::info(
        "saves     {} of train.checkpoint_every were left out, since the one before was still "
        "being "
        "written",
        trainer.saves_skipped());
  log::sum_up_warnings();
  for (const std::string& w : log::warnings()) log::info("warned    {}", w);
}

}  // namespace weft
