#include "train/run_facts.h"

#include <algorithm>
#include <fstream>
#include <nlohmann/json.hpp>

#include "core/device.h"
#include "core/error.h"
#include "core/log.h"
#include "core/version.h"

namespace weft {
namespace {

std::string mib(double bytes) {
  return bytes >= (1 << 30) ? fmt::format("{:.2f} GiB", bytes / (1 << 30))
                            : fmt::format("{:.1f} MiB", bytes / (1 << 20));
}

void write_text(const std::filesystem::path& path, const std::string& text) {
  std::ofstream out(path, std::ios::trunc);
  out << text;
  out.close();
  WEFT_CHECK(bool(out), Exit::usage, "check that run.dir can be written and is not full",
             "cannot write {}", path.string());
}

}  // namespace

RunFacts::RunFacts(const Deck& deck, Stdit3& model, const ClipSource& source,
                   const Communicator& comm, int threads, std::size_t planned_bytes)
    : deck_(deck), planned_bytes_(planned_bytes) {
  ParameterTable& p = model.params();
  // Weights, gradients, two moments, EMA; and the bf16 copy.
  const double per_element = 20.0 + (p.working().defined() ? 2.0 : 0.0);
  state_bytes_ = per_element * static_cast<double>(p.values().numel());
  std::int64_t clips = 0;
  for (const Bucket& b : source.buckets()) clips += b.clips;
  rows_ = {
      {"build", version_line()},
      {"run", deck.run.dir},
      {"ranks", fmt::format("{} (data parallel), {} threads each, {}", comm.size(), threads,
                            comm.describe())},
      {"device", on_cuda() ? device_runtime().describe() : describe_cpu()},
      {"model",
       fmt::format("{}: {} pairs, C = {}, {} heads, {}, {} parameters ({} trained)",
                   deck.model.name, deck.model.depth, deck.model.hidden_size, deck.model.num_heads,
                   deck.model.dtype, p.total_elements(), p.trainable_elements())},
      {"data",
       fmt::format("{}: {} clips in {} buckets", deck.data.path, clips, source.buckets().size())},
      {"step", fmt::format("{} micro-batches of {}, {} gradient buckets", deck.train.micro_batches,
                           deck.train.batch_size, p.buckets().size())},
      {"memory", fmt::format("{} of state, {} of activations a rank (planned)", mib(state_bytes_),
                             mib(static_cast<double>(planned_bytes)))},
      {"kernels", on_cuda() ? std::string("cuBLASLt matmul; weft CUDA for the rest")
                            : fmt::format("oneDNN matmul; weft {} for the rest",
                                          ops::cpu_is_v4() ? "AVX-512" : "AVX2")},
  };
}

void RunFacts::print() const {
  for (const auto& [name, value] : rows_) log::info("{:<9} {}", name, value);
}

void RunFacts::write(const std::filesystem::path& run_dir) const {
  write_text(run_dir / "deck.toml", to_toml(deck_));
  nlohmann::ordered_json j;
  for (const auto& [name, value] : rows_) j[name] = value;
  write_text(run_dir / "run.json", j.dump(2) + "\n");
}

void RunFacts::count(const StepMetrics& m) {
  seconds_.push_back(m.seconds);
  total_seconds_ += m.seconds;
  total_.data_wait += m.split.data_wait;
  total_.compute += m.split.compute;
  total_.comm_exposed += m.split.comm_exposed;
  total_.optimizer += m.split.optimizer;
  total_.checkpoint += m.split.checkpoint;
}

void RunFacts::print_step(const StepMetrics& m) const {
  log::info(
      "step {:>6}/{}  loss {:.5f}  grad {:.3f}  lr {:.2e}  {:.3f} s  (data {:.1f} %, comm {:.1f} "
      "%, "
      "save {:.1f} %)",
      m.step + 1, deck_.train.steps, m.loss, m.grad_norm, m.lr, m.seconds,
      100 * m.split.data_wait / m.seconds, 100 * m.split.comm_exposed / m.seconds,
      100 * m.split.checkpoint / m.seconds);
}

void RunFacts::print_end(std::size_t arena_peak, double comm_busy) const {
  if (!seconds_.empty()) {
    std::vector<double> sorted = seconds_;
    std::sort(sorted.begin(), sorted.end());
    const auto share = [&](double s) { return 100 * s / total_seconds_; };
    log::info("{} steps in {:.1f} s, median step {:.4f} s", seconds_.size(), total_seconds_,
              sorted[sorted.size() / 2]);
    log::info(
        "time      compute {:.1f} %, exposed communication {:.1f} % (of {:.2f} s in all), "
        "optimizer "
        "{:.1f} %, data wait {:.2f} %, checkpoints {:.1f} %",
        share(total_.compute), share(total_.comm_exposed), comm_busy, share(total_.optimizer),
        share(total_.data_wait), share(total_.checkpoint));
    log::info("memory    {} of activations at the peak ({} planned), {} resident",
              mib(static_cast<double>(arena_peak)), mib(static_cast<double>(planned_bytes_)),
              mib(static_cast<double>(resident_bytes())));
  }
  for (const std::string& w : log::warnings()) log::info("warned    {}", w);
}

}  // namespace weft
