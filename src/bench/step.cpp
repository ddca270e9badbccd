// `weft bench step` and `weft bench t5`: a training step of STDiT3, and the layers of T5, timed.
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "bench/bench.h"
#include "bench/step_inputs.h"
#include "checkpoint/weights.h"
#include "core/clock.h"
#include "core/error.h"
#include "core/host.h"
#include "core/log.h"
#include "core/philox.h"
#include "models/registry.h"
#include "models/stdit3/options.h"
#include "models/t5/options.h"
#include "models/t5/t5.h"
#include "ops/loss.h"
#include "ops/matmul.h"
#include "ops/optimizer.h"
#include "ops/pointwise.h"
#include "ops/random.h"
#include "parallel/rank_device.h"
#include "tensor/device.h"
#include "tensor/tensor.h"
#include "train/data_parallel.h"
#include "train/memory_plan.h"
#include "train/step_work.h"

namespace weft {

Shape TensorFile::shape(const std::string& name, std::size_t rank) const {
  const std::vector<std::int64_t>& s = shape(name);
  WEFT_CHECK(s.size() == rank, Exit::data, hint_, "input \"{}\" has {} dimensions, wanted {}", name,
             s.size(), rank);
  return Shape(std::span<const std::int64_t>(s));
}

Tensor TensorFile::f32(const std::string& name, const Shape& wanted) const {
  const SafetensorEntry& e = file_.at(name);
  const Shape got{std::span<const std::int64_t>(e.shape)};
  WEFT_CHECK(got == wanted, Exit::data, hint_, "{}: input \"{}\" has shape {}, wanted {}",
             file_.path().string(), name, got.str(), wanted.str());
  const std::vector<float> values = file_.read_f32(e);
  return Tensor::from_host(std::span<const float>(values), wanted);
}

std::vector<float> TensorFile::numbers(const std::string& name, std::int64_t count) const {
  const Tensor t = f32(name, {count}).to_host();
  return {t.span<float>().begin(), t.span<float>().end()};
}

std::vector<std::uint8_t> TensorFile::u8(const std::string& name) const {
  const SafetensorEntry& e = file_.at(name);
  WEFT_CHECK(e.dtype == DType::u8, Exit::data, hint_, "{}: input \"{}\" is {}, wanted u8",
             file_.path().string(), name, name_of(e.dtype));
  std::vector<std::uint8_t> values(e.end - e.begin);
  file_.read(e, std::as_writable_bytes(std::span(values)));
  return values;
}

StepInputs read_step_inputs(const TensorFile& inputs, const Stdit3Config& model) {
  StepInputs c;
  const auto& xs = inputs.shape("x");
  WEFT_CHECK(xs.size() == 5 && xs[1] == model.in_channels, Exit::data,
             "x is [B, in_channels, T, H, W]", "input \"x\" has {} dimensions", xs.size());
  const std::int64_t B = xs[0];
  c.x = inputs.f32("x", Shape(std::span<const std::int64_t>(xs)));
  const auto& ys = inputs.shape("y");
  WEFT_CHECK(ys.size() == 4 && ys[0] == B && ys[1] == 1, Exit::data,
             "y is [B, 1, length, caption_channels]", "input \"y\" has {} dimensions", ys.size());
  const std::int64_t length = ys[2];
  // With skip_y_embedder captions come projected already.
  c.y = inputs.f32(
      "y", {B, 1, length, model.skip_y_embedder ? model.hidden_size : model.caption_channels});
  std::vector<std::int64_t> mask;
  if (inputs.has("mask")) mask = inputs.i64("mask");
  WEFT_CHECK(mask.empty() || (static_cast<std::int64_t>(mask.size()) % length == 0 &&
                              B % (static_cast<std::int64_t>(mask.size()) / length) == 0),
             Exit::data, "its rows must divide the batch", "input \"mask\" does not fit y");
  c.captions = pack_captions(mask, length, B, false);
  c.in.captions = upload(c.captions, c.y);
  c.in.fps = inputs.f32("fps", {B});
  c.in.height = static_cast<double>(inputs.numbers("height", B)[0]);
  c.in.width = static_cast<double>(inputs.numbers("width", B)[0]);
  if (inputs.has("x_mask")) {
    const std::vector<std::int64_t> m = inputs.i64("x_mask");
    WEFT_CHECK(static_cast<std::int64_t>(m.size()) == B * xs[2], Exit::data, "x_mask is [B, T]",
               "input \"x_mask\" has {} elements", m.size());
    const std::vector<std::uint8_t> mask_bytes(m.begin(), m.end());
    c.in.x_mask = Tensor::from_host(std::span<const std::uint8_t>(mask_bytes), {B, xs[2]});
  }
  return c;
}

namespace {

struct Batch : StepInputs {
  Tensor noise;
};

// A batch of noise for a latent of `shape`, as training would make it.
Batch noise_batch(const std::string& text, std::int64_t captions, const Stdit3Config& model) {
  std::vector<std::int64_t> s;
  std::istringstream in(text);
  for (std::string part; std::getline(in, part, 'x');)
    s.push_back(std::strtoll(part.c_str(), nullptr, 10));
  WEFT_CHECK(s.size() == 4 && *std::min_element(s.begin(), s.end()) > 0, Exit::usage,
             "write clips x frames x height x width of the latent, such as --shape 1x15x60x106",
             "--shape {}", text);
  WEFT_CHECK(captions >= 1 && captions <= model.model_max_length, Exit::usage,
             "--captions is at most model.model_max_length", "--captions {}", captions);
  const std::int64_t B = s[0];
  Batch c;
  c.x = Tensor::empty({B, model.in_channels, s[1], s[2], s[3]}, DType::f32);
  ops::fill_normal(1, static_cast<int>(Purpose::synthetic), 0, 0, c.x);
  c.y = Tensor::empty({B, 1, captions, model.caption_channels}, DType::f32);
  ops::fill_normal(1, static_cast<int>(Purpose::synthetic), 0, 1, c.y);
  c.captions = pack_captions({}, captions, B, false);
  c.in.captions = upload(c.captions, c.y);
  const auto filled = [B](float value) {
    const std::vector<float> v(B, value);
    return Tensor::from_host(std::span<const float>(v), {B});
  };
  c.in.fps = filled(24);
  c.in.timestep = filled(500);
  c.in.height = static_cast<double>(s[2]) * 8;
  c.in.width = static_cast<double>(s[3]) * 8;
  c.noise = Tensor::empty(c.x.shape(), DType::f32);
  ops::fill_normal(1, static_cast<int>(Purpose::noise), 0, 0, c.noise);
  return c;
}

Batch batch_of(const BenchStepRequest& request, const Stdit3Config& model) {
  if (request.inputs.empty()) return noise_batch(request.shape, request.captions, model);
  const TensorFile inputs(request.inputs, "docs/gpu.md lists the tensors of --inputs");
  Batch batch{read_step_inputs(inputs, model), {}};
  batch.in.timestep = inputs.f32("timestep", {batch.x.dim(0)});
  batch.noise = inputs.f32("noise", batch.x.shape());
  return batch;
}

// Loss and gradient norm of one step of the deck's model, but one pair of blocks deep and on a
// small clip: what the CPU can repeat in a moment.
std::pair<double, double> small_step(Deck deck) {
  deck.get<Stdit3Deck>().depth = 1;
  Stdit3 model(stdit3_config(deck));
  ParameterTable& params = model.params();
  params.allocate(1 << 22, deck.model.dtype == "bf16", true);
  params.initialise(static_cast<std::uint64_t>(deck.run.seed));
  Tensor results = Tensor::persistent({2}, DType::f64);
  const auto arena = Arena::reserve(std::size_t{2} << 30);
  const ArenaScope scope(*arena);
  const Batch batch =
      noise_batch("1x3x12x10", std::min<std::int64_t>(20, deck.get<Stdit3Deck>().model_max_length),
                  stdit3_config(deck));
  params.begin_step([](int) {});
  Tape tape;
  const float one = 1.0f;
  const Tensor loss = flow_loss(tape, model, batch.x, batch.noise, batch.in,
                                Tensor::from_host(std::span<const float>(&one, 1), {1}));
  Tensor sum = results.slice(0, 1), squares = results.slice(1, 2);
  ops::add_sum(loss, sum);
  tape.backward();
  params.finish_step();
  ops::sum_of_squares(params.grads(), squares, false);
  const Tensor on_host = results.to_host();
  return {on_host.data<double>()[0], std::sqrt(on_host.data<double>()[1])};
}

// How many of the two differ from the CPU side's by more than rounding explains; -1 where the CPU
// is the device.
int wrong_against_cpu(const Deck& deck) {
  if (!on_cuda()) return -1;
  const auto got = small_step(deck);
  const CpuScope on_cpu;
  const auto wanted = small_step(deck);
  const double tolerance = deck.model.dtype == "bf16" ? 2e-2 : 1e-4;
  const auto off = [&](double a, double b) {
    // Negated, so that NaN counts as wrong.
    return !(std::abs(a - b) <= tolerance * std::abs(b));
  };
  return off(got.first, wanted.first) + off(got.second, wanted.second);
}

// Operations of a step on that batch: 3 times the forward's.
double step_flops(const Stdit3& model, const Batch& batch) {
  const auto& patch = model.config().patch_size;
  const auto patches = [&](int axis) {
    const std::int64_t p = patch[axis];
    return (batch.x.dim(axis + 2) + p - 1) / p;
  };
  double flops = 0;
  for (const std::int64_t length : batch.in.captions.lengths)
    flops += 3 * model.forward_flops(patches(0), patches(1) * patches(2), length);
  return flops;
}

void print_profile(const ops::Profile& profile, int steps, double step_seconds) {
  std::vector<std::pair<std::string, ops::OpTime>> rows(profile.begin(), profile.end());
  std::sort(rows.begin(), rows.end(),
            [](const auto& a, const auto& b) { return a.second.seconds > b.second.seconds; });
  fmt::print("{:<30} {:>7} {:>10} {:>7} {:>9}\n", "operation", "calls", "ms a step", "share",
             "GFLOP/s");
  double sum = 0;
  for (const auto& [name, t] : rows) {
    sum += t.seconds / steps;
    fmt::print("{:<30} {:>7} {:>10.3f} {:>6.1f}% {:>9}\n", name, t.calls / steps,
               1e3 * t.seconds / steps, 100 * t.seconds / steps / step_seconds,
               t.flops > 0 ? fmt::format("{:.0f}", t.flops / t.seconds * 1e-9) : "");
  }
  fmt::print("{:<30} {:>7} {:>10.3f} {:>6.1f}%\n", "outside operations", "",
             1e3 * (step_seconds - sum), 100 * (1 - sum / step_seconds));
}

// The table of measured matrix products that steps on a GPU are timed with. Training keeps its own
// in the run directory (Trainer::start); a benchmark has none, so it measures into a file that goes
// with this object, or takes the one that WEFT_MATMUL_CACHE names.
class ProductTable {
 public:
  explicit ProductTable(bool wanted) {
    if (!on_cuda() || &kernels::set_matmul_tuning == nullptr) return;
    measured_ = wanted;
    if (!wanted) {
      kernels::set_matmul_tuning("");
    } else if (const char* given = std::getenv("WEFT_MATMUL_CACHE")) {
      kernels::set_matmul_tuning(given);
    } else {
      temporary_ = std::filesystem::temp_directory_path() / "weft_matmul_XXXXXX";
      const int file = mkstemp(temporary_.data());
      WEFT_CHECK(file >= 0, Exit::usage, "set TMPDIR to a folder that can be written, or --untuned",
                 "cannot write {}, for the measured matrix products", temporary_);
      close(file);
      kernels::set_matmul_tuning(temporary_);
    }
  }
  ~ProductTable() {
    if (temporary_.empty()) return;
    kernels::set_matmul_tuning("");
    unlink(temporary_.c_str());
  }
  ProductTable(const ProductTable&) = delete;
  ProductTable& operator=(const ProductTable&) = delete;

  bool measured() const { return measured_; }

 private:
  std::string temporary_;
  bool measured_ = false;
};

struct Timed {
  std::vector<double> seconds;  // of the steps that count
  std::vector<double> losses;   // of all
  ops::Profile profile;
  std::int64_t graph_replays = 0;
};

// Steps on one batch: forward, backward, gradient norm, update. Each is waited for.
Timed time_steps(const Deck& deck, const BenchStepRequest& request, Stdit3& model,
                 OptimizerState& optimizer, const Batch& batch) {
  Timed timed;
  ParameterTable& params = model.params();
  const std::int64_t B = batch.x.dim(0);
  const float share = 1.0f / static_cast<float>(B);
  const Tensor weight = Tensor::from_host(std::span<const float>(&share, 1), {1});
  Tensor results = Tensor::persistent({2}, DType::f64);
  Tensor loss_sum = results.slice(0, 1), squares = results.slice(1, 2);
  // A replayed graph calls no operation that could be timed, so a profile runs without.
  StepGraphs graphs(on_cuda() && deck.device.graphs && !request.profile);
  for (int i = 0; i < request.warmup + request.steps; ++i) {
    if (i == request.warmup && request.profile) ops::set_profile(&timed.profile);
    const double start = now_seconds();
    const DeviceEvent begin = on_cuda() ? device_runtime().record(Stream::compute) : DeviceEvent();
    ops::fill_zero(results);
    params.begin_step([](int) {});
    graphs.run("step", params, [&] {
      Tape tape;
      const Tensor loss = flow_loss(tape, model, batch.x, batch.noise, batch.in, weight);
      ops::add_sum(loss, loss_sum);
      tape.backward();
      params.finish_step();
    });
    if (deck.train.grad_clip != 0) ops::sum_of_squares(params.grads(), squares, false);
    for (std::size_t b = 0; b < params.buckets().size(); ++b)
      optimizer_step(deck.train, i, squares, optimizer, static_cast<int>(b));
    double taken = now_seconds() - start;
    if (on_cuda()) {
      const DeviceEvent end = device_runtime().record(Stream::compute);
      device_runtime().synchronize(end);
      taken = device_runtime().seconds(begin, end);
    }
    if (i >= request.warmup) timed.seconds.push_back(taken);
    timed.losses.push_back(results.to_host().data<double>()[0] / static_cast<double>(B));
  }
  ops::set_profile(nullptr);
  timed.graph_replays = graphs.replays();
  return timed;
}

}  // namespace

int bench_step(const Deck& deck, const BenchStepRequest& request) {
  WEFT_CHECK(deck.model.name == "stdit3", Exit::usage,
             "of other models, weft train logs the time of each step",
             "weft bench step times STDiT3, and model.name is \"{}\"", deck.model.name);
  WEFT_CHECK(request.steps >= 1 && request.warmup >= 0, Exit::usage, "--steps is at least 1",
             "{} steps, {} to warm up", request.steps, request.warmup);
  choose_device(deck.device.kind, true, MPI_COMM_SELF);
  const int threads = set_threads(static_cast<int>(deck.run.threads), 1);
  const bool bf16 = deck.model.dtype == "bf16";

  // 1. Is the GPU right, and what does it reach at best?
  const int wrong = wrong_against_cpu(deck);
  WEFT_CHECK(wrong <= 0, Exit::internal,
             "run weft doctor: if the GPU is well, this is a bug in weft, please report it",
             "loss or gradient norm of a small step differ from the CPU side's");
  double ceiling = 0;
  {
    // In a scope of its own: this memory is free again before the model's arena is sized.
    const auto arena = Arena::reserve(std::size_t{1} << 30);
    const ArenaScope scope(*arena);
    ceiling = product_rate(bf16 ? DType::bf16 : DType::f32);
  }

  // 2. The model, its optimizer and the batch.
  Stdit3 model(stdit3_config(deck));
  ParameterTable& params = model.params();
  params.allocate(bucket_elements(deck.parallel, 1), bf16, true);
  if (request.weights.empty())
    params.initialise(static_cast<std::uint64_t>(deck.run.seed));
  else
    load_weights(request.weights, params);
  OptimizerState optimizer(params, false, 0, 1, true, deck.train.ema_decay);
  const auto arena = Arena::reserve(arena_capacity(deck.memory, 1));
  const ArenaScope scope(*arena);
  const Batch batch = batch_of(request, model.config());

  // 3. The steps, and what they came to.
  const ProductTable products(!request.untuned && !deck.parallel.deterministic);
  const Timed timed = time_steps(deck, request, model, optimizer, batch);
  const double flops = step_flops(model, batch), median = upper_median(timed.seconds);
  if (!request.outputs.empty()) save_weights(request.outputs, params);
  if (!request.json.empty()) {
    const nlohmann::ordered_json j{
        {"build", version_line()},
        {"device", on_cuda() ? device_runtime().describe() : describe_cpu()},
        {"threads", threads},
        {"dtype", deck.model.dtype},
        {"seconds", timed.seconds},
        {"loss", timed.losses},
        {"arena_peak_bytes", arena->peak()},
        {"model_flops", flops},
        {"product_flops_per_second", ceiling},
        {"wrong", wrong},
        {"measured_products", products.measured()},
        {"graph_replays", timed.graph_replays}};
    std::ofstream out(request.json);
    out << j.dump(2) << '\n';
    WEFT_CHECK(bool(out), Exit::usage, "name a file that can be written", "cannot write {}",
               request.json);
  }
  fmt::print(
      "{}, {}: median {:.4f} s (min {:.4f}, max {:.4f}), {:.3f} TFLOP/s ({:.0f} % of "
      "a plain product's), loss {:.6f} -> {:.6f}, wrong {}\n",
      counted(std::ssize(timed.seconds), "step"), counted(threads, "thread"), median,
      *std::min_element(timed.seconds.begin(), timed.seconds.end()),
      *std::max_element(timed.seconds.begin(), timed.seconds.end()), flops / median * 1e-12,
      100 * flops / median / ceiling, timed.losses.front(), timed.losses.back(),
      wrong < 0 ? "-" : "0");
  if (on_cuda())
    fmt::print("matrix products: {}\n", products.measured()
                                            ? "the fastest of the library's algorithms, measured"
                                            : "the library's first proposals, not measured");
  if (request.profile) print_profile(timed.profile, request.steps, median);
  return 0;
}

Command bench_step_command() {
  const auto r = std::make_shared<BenchStepRequest>();
  Command c{"step", "a training step on given weights and inputs",
            [r](const Deck& deck, MPI_Comm) { return bench_step(deck, *r); }};
  c.first_rank_only = true;
  c.takes_deck();
  c.option("--weights", r->weights, "safetensors with weights (default: random)");
  c.option("--inputs", r->inputs, "safetensors with a batch (default: noise)");
  c.option("--shape", r->shape, "without --inputs: clips x latent frames x height x width");
  c.option("--captions", r->captions, "caption rows per clip");
  c.option("--outputs", r->outputs, "weights after all steps");
  c.option("--steps", r->steps, "timed steps");
  c.option("--warmup", r->warmup, "steps before them");
  c.option("--json", r->json, "file for the results");
  c.option("--profile", r->profile, "time every operation");
  c.option("--untuned", r->untuned, "GPU: the library's first proposals for matrix products");
  return c;
}

int bench_t5(const Deck& deck, const BenchT5Request& request) {
  const RankDevice device = choose_device(deck.device.kind, deck.device.share, MPI_COMM_SELF);
  set_threads(static_cast<int>(deck.run.threads), device.host_ranks);
  WEFT_CHECK(!request.lengths.empty() &&
                 *std::min_element(request.lengths.begin(), request.lengths.end()) >= 1,
             Exit::usage, "give --lengths as tokens of each caption, such as 20,35,60",
             "captions must have 1 token or more");
  const T5Deck config = t5_deck(deck);
  T5Encoder t5(config, 0, config.num_layers);
  t5.params().allocate(1, config.dtype == "bf16", false);
  t5.params().initialise(static_cast<std::uint64_t>(deck.run.seed));
  t5.pack_weights();

  std::vector<std::int32_t> offsets{0};
  for (const std::int64_t n : request.lengths)
    offsets.push_back(offsets.back() + static_cast<std::int32_t>(n));
  const std::int64_t tokens = offsets.back();
  const std::int64_t longest = *std::max_element(request.lengths.begin(), request.lengths.end());
  const auto arena = Arena::reserve(2 * t5.plan(tokens, longest) + (1 << 20));
  const ArenaScope scope(*arena);
  PackedTokens in;
  in.longest = longest;
  std::vector<std::int32_t> ids;
  for (std::int64_t i = 0; i < tokens; ++i)
    ids.push_back(static_cast<std::int32_t>((i * 7919 + 3) % config.vocab_size));
  in.ids = Tensor::from_host(std::span<const std::int32_t>(ids), {tokens});
  in.offsets = Tensor::from_host(std::span<const std::int32_t>(offsets),
                                 {static_cast<std::int64_t>(offsets.size())});
  for (std::int64_t round = -request.warmup; round < request.rounds; ++round) {
    if (request.paced && round >= 0) {
      fmt::print("ready\n");
      std::fflush(stdout);
      std::string line;
      std::getline(std::cin, line);
    }
    const double start = now_seconds();
    t5.forward(in, Tensor()).to_host();
    if (round >= 0) fmt::print("{:.6f}\n", now_seconds() - start);
    std::fflush(stdout);
  }
  return 0;
}

Command bench_t5_command() {
  const auto r = std::make_shared<BenchT5Request>();
  Command c{"t5", "the layers of the T5 encoder",
            [r](const Deck& deck, MPI_Comm) { return bench_t5(deck, *r); }};
  c.first_rank_only = true;
  c.takes_deck();
  c.option("--lengths", r->lengths, "tokens of each caption").commas = true;
  c.option("--rounds", r->rounds, "timed passes");
  c.option("--warmup", r->warmup, "passes before them");
  c.option("--paced", r->paced, "before each, wait for a line on stdin");
  return c;
}

}  // namespace weft
