// `weft bench step`: a training step of any model, timed on one micro-batch.
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <ranges>
#include <tuple>

#include "bench/bench.h"
#include "bench/step_inputs.h"
#include "checkpoint/weights.h"
#include "core/clock.h"
#include "core/error.h"
#include "core/file.h"
#include "core/host.h"
#include "core/json.h"
#include "core/log.h"
#include "models/registry.h"
#include "ops/ways.h"
#include "parallel/rank_device.h"
#include "tensor/device.h"
#include "train/step_cost.h"
#include "train/trainer.h"

namespace weft {
namespace {

// Data of one micro-batch: `sizes` = clips, latent frames, height and width, each clip with a
// caption of so many tokens (0: none).
void set_data(Deck& deck, const std::array<std::int64_t, 4>& sizes, std::int64_t channels,
              std::int64_t tokens, std::int64_t text_channels) {
  deck.data.paths.clear();
  deck.data.weights.clear();
  deck.data.prompt_prefixes.clear();
  deck.data.keep.clear();
  deck.data.text_features.clear();
  // Pixels have three channels, latents never so many.
  deck.data.path = fmt::format(
      "synthetic:clips={},frames={},height={},width={},latent={},channels={},tokens={},"
      "text_channels={}",
      sizes[0], sizes[1], sizes[2], sizes[3], channels == 3 ? 0 : 1, channels, tokens,
      text_channels);
  deck.train.batch_size = sizes[0];
  deck.train.batch_sizes.clear();
}

// The same from --shape and --captions, for the latents of the deck's denoiser. `captions`: 0 for
// as many tokens as it takes.
void set_latents(Deck& deck, const std::string& shape, std::int64_t captions) {
  const Model* model = find_model(deck.model.name);
  WEFT_CHECK(model != nullptr && model->make_denoiser != nullptr, Exit::usage,
             "leave it out: a micro-batch of data.path is timed, such as data.path=shapes:... or "
             "text:...",
             "--shape {}: {} does not train on latents", shape, deck.model.name);
  std::array<std::int64_t, 4> sizes{};
  const char *at = shape.data(), *const end = at + shape.size();
  bool good = true;
  for (std::size_t i = 0; i < sizes.size() && good; ++i) {
    const auto [next, error] = std::from_chars(at, end, sizes[i]);
    good = error == std::errc() && sizes[i] > 0 && (i == 3 ? next == end : *next == 'x');
    at = next + 1;
  }
  WEFT_CHECK(good, Exit::usage,
             "write clips x frames x height x width of the latent, such as --shape 1x15x60x106",
             "--shape {}", shape);
  const std::unique_ptr<Denoiser> denoiser = model->make_denoiser(deck);
  const std::int64_t most = denoiser->max_caption();
  WEFT_CHECK(
      captions >= 0 && captions <= most, Exit::usage,
      fmt::format("a caption has at most {} tokens here ({})", most, denoiser->caption_keys()),
      "--captions {}", captions);
  set_data(deck, sizes, denoiser->channels(), captions == 0 ? most : captions,
           denoiser->caption_channels());
}

// The matrix products that a dry run meets.
class ProductWatch : public ops::OpWatch {
 public:
  void met(const std::string& name, const ops::Cost&, std::span<const Tensor> tensors) override {
    if (!(name.starts_with("linear_") || name.starts_with("fp8_linear_")) ||
        tensors[0].numel() == 0)
      return;
    // The operations' arguments: x, w; dy, w; dy, x, dw (ops/matmul.h).
    const auto of = name.ends_with("weight")  ? StepProduct::Of::weight
                    : name.ends_with("input") ? StepProduct::Of::input
                                              : StepProduct::Of::output;
    const Tensor& w = tensors[of == StepProduct::Of::weight ? 2 : 1];
    const std::int64_t outputs = w.dim(0), inputs = w.numel() / outputs;
    const std::int64_t rows =
        tensors[0].numel() / (of == StepProduct::Of::output ? inputs : outputs);
    ++calls_[{of, rows, outputs, inputs}];
  }
  std::vector<StepProduct> products() const {
    std::vector<StepProduct> all;
    for (const auto& [key, calls] : calls_) {
      const auto& [of, rows, outputs, inputs] = key;
      all.push_back({of, rows, outputs, inputs, calls});
    }
    return all;
  }

 private:
  std::map<std::tuple<StepProduct::Of, std::int64_t, std::int64_t, std::int64_t>, std::int64_t>
      calls_;
};

// A training on one rank that always takes the same micro-batch: the first of the bucket whose
// micro-batches cost most.
class RepeatedStep {
 public:
  // `inputs`, `weights`, `untuned`: as in BenchStepRequest. `table`: of measured choices, which is
  // read and written; "": none.
  RepeatedStep(Deck deck, const std::string& inputs, const std::string& weights,
               const std::string& table = "", bool untuned = false)
      : trainer_(
            repeated(std::move(deck), weights, scratch_.path(), untuned),
            [inputs](const Deck& d) {
              return inputs.empty() ? make_task(d) : make_given_task(d, inputs);
            },
            MPI_COMM_SELF) {
    const std::filesystem::path own = scratch_.path() / "matmul.txt";
    if (!table.empty() && std::filesystem::exists(table))
      replace_file(own, read_whole(table, 64 << 20, Exit::usage, "name a table of --ways"),
                   Exit::usage, Durable::no);
    trainer_.repeat_costliest();
    trainer_.start();
    if (!table.empty() && std::filesystem::exists(own))
      replace_file(table, read_whole(own, 64 << 20, Exit::usage, "set TMPDIR"), Exit::usage,
                   Durable::no);
    ProductWatch watch;
    flops_ = dry_run_cost(trainer_.task(), bucket(), clips(), 0, this_device().kind, h200_targets(),
                          1, &watch)
                 .flops;
    products_ = watch.products();
  }

  // Operations a second of its products alone; 0 where they are less than half of its operations.
  double product_rate(DType dtype, double seconds) {
    double flops = 0;
    for (const StepProduct& p : products_) flops += p.flops();
    if (seconds == 0 || flops < 0.5 * flops_) return 0;
    const ArenaScope scope(trainer_.arena());
    return weft::product_rate(dtype, products_, seconds);
  }

  Trainer& trainer() { return trainer_; }
  const Bucket& bucket() const {
    return trainer_.source().buckets()[trainer_.repeated().what.bucket];
  }
  std::int64_t clips() const { return std::ssize(trainer_.repeated().what.clips); }
  double recompute() const { return trainer_.memory()[trainer_.repeated().what.bucket].recompute; }
  double flops() const { return flops_; }  // of the model, for such a step

 private:
  static Deck repeated(Deck deck, const std::string& weights, const std::filesystem::path& folder,
                       bool untuned) {
    deck.run.dir = folder.string();
    deck.run.resume = false;
    deck.train.micro_batches = 1;
    deck.parallel.sp = 1;
    const std::array<std::pair<std::string, std::string>, 2> all_clips = {
        {{"validation.path", "\"\""}, {"validation.share", "0"}}};
    set_keys(deck, all_clips, "weft bench step");
    if (!weights.empty()) deck.model.weights = weights;
    // So the first way of everything is taken, and nothing is measured.
    if (untuned) deck.parallel.deterministic = true;
    return deck;
  }

  ScratchFolder scratch_;
  Trainer trainer_;
  double flops_ = 0;
  std::vector<StepProduct> products_;
};

// One step of the deck's denoiser, but one block (or pair) deep and on a small clip: what the CPU
// can repeat in a moment.
StepMetrics small_step(Deck deck) {
  const std::pair<std::string, std::string> one_block{"model.depth", "1"};
  set_keys(deck, std::span(&one_block, 1), "weft bench step");
  deck.memory.arena_gib = 2;
  set_latents(deck, "1x3x12x10", 0);
  if (!on_cuda()) deck.device.kind = "cpu";
  RepeatedStep step(deck, "", "");
  step.trainer().step();
  return step.trainer().finished(true).front();
}

// How many of loss and gradient norm differ from the CPU side's by more than rounding explains; -1
// where that cannot be told: the CPU is the device, the model is no denoiser, or starts from files.
int wrong_against_cpu(const Deck& deck) {
  if (!on_cuda() || find_model(deck.model.name)->make_denoiser == nullptr ||
      !deck.model.weights.empty())
    return -1;
  const StepMetrics got = small_step(deck);
  const CpuScope on_cpu;
  const StepMetrics wanted = small_step(deck);
  const double tolerance = holds_bf16(deck.model.dtype) ? 2e-2 : 1e-4;
  const auto off = [&](double a, double b) {
    // Negated, so that NaN counts as wrong.
    return !(std::abs(a - b) <= tolerance * std::abs(b));
  };
  return off(got.loss, wanted.loss) + off(got.grad_norm, wanted.grad_norm);
}

}  // namespace

int bench_step(const Deck& given, const BenchStepRequest& request) {
  WEFT_CHECK(find_model(given.model.name) != nullptr, Exit::usage,
             fmt::format("these train: {}", trained_models()), "model.name = \"{}\"",
             given.model.name);
  choose_device(given.device.kind, true, MPI_COMM_SELF);
  const int threads = set_threads(static_cast<int>(given.run.threads), 1);
  Deck deck = given;
  if (!request.inputs.empty()) {
    WEFT_CHECK(deck.model.name == "stdit3", Exit::usage, "leave it out: the batch is then made",
               "--inputs holds a batch of STDiT3, and model.name is \"{}\"", deck.model.name);
    const Shape x = given_shape(request.inputs);
    set_data(deck, {x[0], x[2], x[3], x[4]}, x[1], 0, 0);
  } else if (!request.shape.empty()) {
    set_latents(deck, request.shape, request.captions);
  }

  // 1. Is the GPU right, and what does it reach at best?
  const int wrong = wrong_against_cpu(deck);
  WEFT_CHECK(wrong <= 0, Exit::internal,
             "run weft doctor: if the GPU is well, this is a bug in weft, please report it",
             "loss or gradient norm of a small step differ from the CPU side's");
  // Now, for later the model's arena may leave no memory.
  DeviceRates rates = device_rates();
  const DType type = holds_bf16(deck.model.dtype) ? DType::bf16 : DType::f32;
  double& ceiling = type == DType::bf16 ? rates.bf16_products : rates.f32_products;

  // 2. The steps.
  // A replayed graph calls no operation that could be timed.
  if (request.profile) deck.device.graphs = false;
  const bool measured = on_cuda() && &kernels::set_ways != nullptr && !request.untuned &&
                        !deck.parallel.deterministic;
  RepeatedStep step(deck, request.inputs, request.weights, request.ways, request.untuned);
  Trainer& trainer = step.trainer();
  std::vector<double> seconds, losses;
  ops::Profile profile;
  const int all = request.warmup + request.steps;
  for (int i = 0; i < all; ++i) {
    if (i == request.warmup && request.profile) ops::set_profile(&profile);
    trainer.step();
    for (const StepMetrics& m : trainer.finished(i + 1 == all)) {
      if (m.step >= request.warmup) seconds.push_back(m.seconds);
      losses.push_back(m.loss);
    }
  }
  ops::set_profile(nullptr);
  trainer.communicator().progress(all, Phase::none);  // what follows is no step
  const std::string taken = measured ? kernels::ways_taken() : "";
  const double own = step.product_rate(type, request.ceiling);
  if (own > 0) ceiling = own;

  // 3. What they came to.
  const double median = upper_median(seconds);
  if (!request.outputs.empty()) save_weights(request.outputs, trainer.params());
  if (!request.json.empty()) {
    const nlohmann::ordered_json j{
        {"build", version_line()},
        {"device", on_cuda() ? device_runtime().describe() : describe_cpu()},
        {"threads", threads},
        {"model", trainer.task().describe()},
        {"bucket", step.bucket().name},
        {"clips", step.clips()},
        {"recompute", step.recompute()},
        {"dtype", deck.model.dtype},
        {"seconds", seconds},
        {"loss", losses},
        {"arena_peak_bytes", trainer.arena().peak()},
        {"model_flops", step.flops()},
        {"product_flops_per_second", ceiling},
        {"products_of_the_step", own > 0},
        {"wrong", wrong},
        {"measured_products", measured},
        {"tried", deck.device.tried},
        {"ways", taken},
        {"graph_replays", trainer.graphs().replays()}};
    std::ofstream out(request.json);
    out << dump_json(j, 2) << '\n';
    WEFT_CHECK(bool(out), Exit::usage, "name a file that can be written", "cannot write {}",
               request.json);
  }
  fmt::print("{}; {} of bucket {}{}\n", trainer.task().describe(), counted(step.clips(), "sample"),
             step.bucket().name,
             step.recompute() > 0
                 ? fmt::format(", {:.0f} % of the blocks recomputed", 100 * step.recompute())
                 : "");
  fmt::print(
      "{}, {}: median {:.4f} s (min {:.4f}, max {:.4f}), {:.3f} TFLOP/s ({:.0f} % of "
      "{}), loss {:.6f} -> {:.6f}, wrong {}\n",
      counted(std::ssize(seconds), "step"), counted(threads, "thread"), median,
      *std::min_element(seconds.begin(), seconds.end()),
      *std::max_element(seconds.begin(), seconds.end()), step.flops() / median * 1e-12,
      100 * step.flops() / median / ceiling,
      own > 0 ? fmt::format("its products' alone, the median of {:.3g} s", request.ceiling)
              : "a plain product's",
      losses.front(), losses.back(), wrong < 0 ? "-" : "0");
  if (on_cuda())
    fmt::print("matrix products: {}\nuntested ways: {}\n",
               measured ? "the fastest of the library's algorithms, measured"
                        : "the library's first proposals, not measured",
               !taken.empty() ? taken
               : !deck.device.tried.empty()
                   ? "not measured"
                   : fmt::format("none (device.try may have {})",
                                 fmt::join(kernels::untested_ways |
                                               std::views::transform(&kernels::UntestedWay::name),
                                           ", ")));
  if (request.profile) fmt::print("{}", profile_table(profile, rates, request.steps, median));
  return 0;
}

Command bench_step_command() {
  const auto r = std::make_shared<BenchStepRequest>();
  Command c{"step", "a training step on one micro-batch, loaded once",
            [r](const Deck& deck, MPI_Comm) { return bench_step(deck, *r); }};
  c.first_rank_only = true;
  c.takes_deck();
  c.option("--shape", r->shape,
           "clips x latent frames x height x width (default: the costliest of the deck's data)");
  c.number("--captions", r->captions, 0, 1e6,
           "with --shape: tokens of a caption (default: the most)");
  c.path("--inputs", r->inputs, "safetensors with a batch of STDiT3 instead");
  c.path("--weights", r->weights, "safetensors with weights (default: as a training starts)");
  c.path("--outputs", r->outputs, "weights after all steps");
  c.number("--steps", r->steps, 1, 1e6, "timed steps");
  c.number("--warmup", r->warmup, 0, 1e6, "steps before them");
  c.path("--json", r->json, "file for the results");
  c.option("--profile", r->profile, "time every operation");
  c.number(
      "--ceiling", r->ceiling, 0, 3600,
      "seconds for the step's products alone, whose rate is the ceiling (0: a large product's)");
  c.path("--ways", r->ways,
         "GPU: file for the measured choices, taken from there if they are in it");
  c.option("--untuned", r->untuned, "GPU: the library's first proposals for matrix products");
  return c;
}

}  // namespace weft
