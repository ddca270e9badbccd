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
#include "ops/optimizer.h"
#include "ops/ways.h"
#include "parallel/rank_device.h"
#include "tensor/device.h"
#include "train/data_parallel.h"
#include "train/step_cost.h"
#include "train/step_work.h"

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

// What the trainer does in a step (train/trainer.h), on one rank and always with the same
// micro-batch: the first of the bucket whose micro-batches cost most.
class RepeatedStep {
 public:
  // `inputs`, `weights`: as in BenchStepRequest; `graphs`: record the micro-batch where a GPU can.
  RepeatedStep(const Deck& deck, const std::string& inputs, const std::string& weights, bool graphs)
      : deck_(deck),
        comm_(make_communicator(MPI_COMM_SELF)),
        source_(open_clip_source(deck_.data, deck_.media)),
        batch_sizes_(batch_sizes(deck_.train, source_->buckets())),
        task_(inputs.empty() ? make_task(deck_) : make_given_task(deck_, inputs)),
        optimizers_(task_->optimizers()),
        graphs_(on_cuda() && deck_.device.graphs && graphs) {
    task_->join_ranks(MPI_COMM_SELF, comm_.get());
    task_->open(source_->buckets());
    load_clips();
    params().allocate(bucket_elements(deck_.parallel, 1), task_->bf16(), true);
    ProductWatch watch;
    flops_ =
        dry_run_cost(*task_, bucket(), clips(), 0, this_device().kind, h200_targets(), 1, &watch)
            .flops;
    products_ = watch.products();
    task_->start_weights();
    if (!weights.empty()) load_weights(weights, params());
    data_parallel_ = std::make_unique<DataParallel>(
        deck_.parallel, *comm_, params(), [this](std::function<void()> act) { graphs_.aside(act); },
        task_->model_groups());
    data_parallel_->make_state(
        std::ranges::any_of(optimizers_, [](const TrainDeck& o) { return o.optimizer != "sgd"; }),
        deck_.train.ema_decay);
    report_ = std::make_unique<StepReport>(*comm_, params().groups());
    const std::size_t capacity = arena_capacity(deck_.memory, 1);
    memory_ = plan_memory(*task_, source_->buckets(), batch_sizes_, capacity, this_device().kind,
                          keeps_activations(deck_));
    arena_ = Arena::reserve(capacity);
    runner_ = std::make_unique<MicroBatchRunner>(*task_, *source_, graphs_, memory_, batch_sizes_);
  }

  struct Result {
    double seconds = 0, loss = 0, grad_norm = 0;
  };
  // Forward, backward and update, waited for; `number` counts the steps from 0.
  Result run(std::int64_t number) {
    const ArenaScope scope(*arena_);
    const double start = now_seconds();
    const DeviceEvent begin = on_cuda() ? device_runtime().record(Stream::compute) : DeviceEvent();
    report_->clear();
    data_parallel_->begin_step(report_->slot(StepReport::squares));
    runner_->run(*clips_, true, 1.0f / static_cast<float>(clips()),
                 [this](const TrainingLoss& loss) {
                   Tensor total = report_->slot(StepReport::loss);
                   ops::add_sum(loss.clips, total);
                 });
    params().finish_step();
    comm_->wait(report_->send(0, 0, 0, 0));
    data_parallel_->join();
    data_parallel_->norm(report_->rows(), report_->norm());
    data_parallel_->update(optimizers_, number, report_->norm());
    task_->end_step(*report_, number, clips());
    const StepReport::Rows rows = report_->fetch();
    Result result;
    result.seconds = now_seconds() - start;
    if (on_cuda()) {
      const DeviceEvent end = device_runtime().record(Stream::compute);
      device_runtime().synchronize(end);
      result.seconds = device_runtime().seconds(begin, end);
    }
    result.loss = rows.sum(StepReport::loss) / static_cast<double>(clips());
    result.grad_norm = std::sqrt(*rows.squared_norm);
    return result;
  }

  // Operations a second of its products alone; 0 where they are less than half of its operations.
  double product_rate(DType dtype, double seconds) {
    double flops = 0;
    for (const StepProduct& p : products_) flops += p.flops();
    if (seconds == 0 || flops < 0.5 * flops_) return 0;
    const ArenaScope scope(*arena_);
    return weft::product_rate(dtype, products_, seconds);
  }

  // As the trainer does before its first step.
  void measure_ways() {
    const ArenaScope scope(*arena_);
    data_parallel_->begin_passes(true);
    NonZeroWeights weights(params());
    runner_->try_out(*clips_);
    data_parallel_->end_passes();
    weights.restore();
    data_parallel_->spread_weights();
  }

  ParameterTable& params() { return task_->params(); }
  const TrainingTask& task() const { return *task_; }
  const Bucket& bucket() const { return source_->buckets()[clips_->what.bucket]; }
  std::int64_t clips() const { return std::ssize(clips_->what.clips); }
  double recompute() const { return memory_[clips_->what.bucket].recompute; }
  double flops() const { return flops_; }  // of the model, for such a step
  std::size_t arena_peak() const { return arena_->peak(); }
  std::int64_t graph_replays() const { return graphs_.replays(); }

 private:
  void load_clips() {
    const std::vector<Bucket>& buckets = source_->buckets();
    std::size_t costliest = 0;
    double most = -1;
    for (std::size_t b = 0; b < buckets.size(); ++b) {
      const std::int64_t samples = samples_in_batch(buckets[b], batch_sizes_[b]);
      const double cost = static_cast<double>(samples) * task_->cost(buckets[b], 0);
      if (samples > 0 && cost > most) costliest = b, most = cost;
    }
    const auto plan =
        source_->plan_steps(batch_sizes_, 1, static_cast<std::uint64_t>(deck_.run.seed));
    std::int64_t step = 0;
    while (static_cast<std::size_t>(plan->plan(step).front().bucket) != costliest) ++step;
    const Prefetcher::Work work = {{0, plan->plan(step).front()}};
    prefetcher_ = std::make_unique<Prefetcher>(
        *source_, [work](std::int64_t) { return work; }, 0, 1, 1, 1, 0, deck_.data.max_damaged);
    clips_ = &prefetcher_->next();
  }

  Deck deck_;
  std::unique_ptr<Communicator> comm_;
  std::unique_ptr<ClipSource> source_;
  std::vector<std::int64_t> batch_sizes_;
  std::unique_ptr<TrainingTask> task_;
  std::vector<TrainDeck> optimizers_;
  StepGraphs graphs_;
  std::unique_ptr<Prefetcher> prefetcher_;
  const LoadedBatch* clips_ = nullptr;  // of the prefetcher
  double flops_ = 0;
  std::vector<StepProduct> products_;
  std::unique_ptr<DataParallel> data_parallel_;
  std::unique_ptr<StepReport> report_;
  std::vector<StepMemory> memory_;
  std::unique_ptr<Arena> arena_;
  std::unique_ptr<MicroBatchRunner> runner_;
};

// One step of the deck's denoiser, but one block (or pair) deep and on a small clip: what the CPU
// can repeat in a moment.
RepeatedStep::Result small_step(Deck deck) {
  const std::pair<std::string, std::string> one_block{"model.depth", "1"};
  set_keys(deck, std::span(&one_block, 1), "weft bench step");
  deck.memory.arena_gib = 2;
  set_latents(deck, "1x3x12x10", 0);
  return RepeatedStep(deck, "", "", false).run(0);
}

// How many of loss and gradient norm differ from the CPU side's by more than rounding explains; -1
// where that cannot be told: the CPU is the device, the model is no denoiser, or starts from files.
int wrong_against_cpu(const Deck& deck) {
  if (!on_cuda() || find_model(deck.model.name)->make_denoiser == nullptr ||
      !deck.model.weights.empty())
    return -1;
  const RepeatedStep::Result got = small_step(deck);
  const CpuScope on_cpu;
  const RepeatedStep::Result wanted = small_step(deck);
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
  RepeatedStep step(deck, request.inputs, request.weights, !request.profile);
  // Training keeps its table in the run directory (Trainer::choose_ways).
  const bool measured = on_cuda() && &kernels::set_ways != nullptr && !request.untuned &&
                        !deck.parallel.deterministic;
  std::string table;
  if (measured && !request.ways.empty() && std::filesystem::exists(request.ways))
    table = read_whole(request.ways, 64 << 20, Exit::usage, "name a table that --ways wrote");
  if (on_cuda() && &kernels::set_ways != nullptr)
    kernels::set_ways(
        {.tried = deck.device.tried, .table = table, .measure = measured, .only = {}});
  if (measured) step.measure_ways();
  std::vector<double> seconds, losses;
  ops::Profile profile;
  for (int i = 0; i < request.warmup + request.steps; ++i) {
    // A replayed graph calls no operation that could be timed, so a profile runs without.
    if (i == request.warmup && request.profile) ops::set_profile(&profile);
    const RepeatedStep::Result result = step.run(i);
    if (i >= request.warmup) seconds.push_back(result.seconds);
    losses.push_back(result.loss);
  }
  ops::set_profile(nullptr);
  const std::string taken = measured ? kernels::ways_taken() : "";
  if (measured && !request.ways.empty())
    replace_file(request.ways, kernels::ways_table(), Exit::usage, Durable::no);
  // Behind the table: it has the step's choices alone.
  const double own = step.product_rate(type, request.ceiling);
  if (own > 0) ceiling = own;

  // 3. What they came to.
  const double median = upper_median(seconds);
  if (!request.outputs.empty()) save_weights(request.outputs, step.params());
  if (!request.json.empty()) {
    const nlohmann::ordered_json j{
        {"build", version_line()},
        {"device", on_cuda() ? device_runtime().describe() : describe_cpu()},
        {"threads", threads},
        {"model", step.task().describe()},
        {"bucket", step.bucket().name},
        {"clips", step.clips()},
        {"recompute", step.recompute()},
        {"dtype", deck.model.dtype},
        {"seconds", seconds},
        {"loss", losses},
        {"arena_peak_bytes", step.arena_peak()},
        {"model_flops", step.flops()},
        {"product_flops_per_second", ceiling},
        {"products_of_the_step", own > 0},
        {"wrong", wrong},
        {"measured_products", measured},
        {"tried", deck.device.tried},
        {"ways", taken},
        {"graph_replays", step.graph_replays()}};
    std::ofstream out(request.json);
    out << dump_json(j, 2) << '\n';
    WEFT_CHECK(bool(out), Exit::usage, "name a file that can be written", "cannot write {}",
               request.json);
  }
  fmt::print("{}; {} of bucket {}{}\n", step.task().describe(), counted(step.clips(), "sample"),
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
