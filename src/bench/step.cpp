#include "bench/bench.h"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "bench/ceiling.h"
#include "bench/step_inputs.h"
#include "checkpoint/weights.h"
#include "core/clock.h"
#include "core/error.h"
#include "core/host.h"
#include "core/log.h"
#include "core/philox.h"
#include "models/stdit3/options.h"
#include "ops/loss.h"
#include "ops/optimizer.h"
#include "ops/pointwise.h"
#include "ops/random.h"
#include "parallel/rank_device.h"
#include "tensor/device.h"
#include "train/data_parallel.h"
#include "train/memory_plan.h"
#include "train/step_work.h"

namespace weft {
namespace {

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

// A batch of noise for a latent of `shape`, as training would make it.
StepInputs noise_batch(const std::string& text, std::int64_t captions, const Stdit3Config& model) {
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
  StepInputs c;
  c.x = Tensor::empty({B, model.in_channels, s[1], s[2], s[3]}, DType::f32);
  ops::fill_normal(1, static_cast<int>(Purpose::synthetic), 0, 0, c.x);
  c.y = Tensor::empty({B, 1, captions, model.caption_channels}, DType::f32);
  ops::fill_normal(1, static_cast<int>(Purpose::synthetic), 0, 1, c.y);
  c.captions = pack_captions({}, captions, B, false);
  c.in.captions = upload(c.captions, c.y);
  const auto filled = [B](float value) {
    const std::vector<float> v(static_cast<std::size_t>(B), value);
    return Tensor::from_host(std::span<const float>(v), {B});
  };
  c.in.fps = filled(24);
  c.in.timestep = filled(500);
  c.in.height = static_cast<double>(s[2]) * 8;
  c.in.width = static_cast<double>(s[3]) * 8;
  return c;
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
  StepInputs c =
      noise_batch("1x3x12x10", std::min<std::int64_t>(20, deck.get<Stdit3Deck>().model_max_length),
                  stdit3_config(deck));
  Tensor noise = Tensor::empty(c.x.shape(), DType::f32);
  ops::fill_normal(1, static_cast<int>(Purpose::noise), 0, 0, noise);
  params.begin_step([](int) {});
  Tape tape;
  const float one = 1.0f;
  const Tensor loss = flow_loss(tape, model, c.x, noise, c.in,
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

}  // namespace

int bench_step(const Deck& deck, const BenchStepRequest& request) {
  WEFT_CHECK(request.steps >= 1 && request.warmup >= 0, Exit::usage, "--steps is at least 1",
             "{} steps, {} to warm up", request.steps, request.warmup);
  choose_device(deck.device.kind, true, MPI_COMM_SELF);
  const int threads = set_threads(static_cast<int>(deck.run.threads), 1);
  const int wrong = wrong_against_cpu(deck);
  WEFT_CHECK(wrong <= 0, Exit::internal,
             "run weft doctor: if the GPU is well, this is a bug in weft, please report it",
             "loss or gradient norm of a small step differ from the CPU side's");
  double ceiling = 0;
  {
    // In a scope of its own: this memory is free again before the model's arena is sized.
    const auto arena = Arena::reserve(std::size_t{1} << 30);
    const ArenaScope scope(*arena);
    ceiling = product_rate(deck.model.dtype == "bf16" ? DType::bf16 : DType::f32);
  }
  Stdit3 model(stdit3_config(deck));
  ParameterTable& params = model.params();
  params.allocate(static_cast<std::int64_t>(deck.parallel.bucket_mib * (1 << 20) / 4),
                  deck.model.dtype == "bf16", true);
  if (request.weights.empty())
    params.initialise(static_cast<std::uint64_t>(deck.run.seed));
  else
    load_weights(request.weights, params);
  OptimizerState optimizer(params, false, 0, 1);
  Tensor results = Tensor::persistent({2}, DType::f64);  // loss sum, squared gradient norm
  const auto arena = Arena::reserve(arena_capacity(deck.memory, 1));
  const ArenaScope scope(*arena);
  StepInputs c;
  Tensor noise;
  if (request.inputs.empty()) {
    c = noise_batch(request.shape, request.captions, stdit3_config(deck));
    noise = Tensor::empty(c.x.shape(), DType::f32);
    ops::fill_normal(1, static_cast<int>(Purpose::noise), 0, 0, noise);
  } else {
    const TensorFile inputs(request.inputs, "docs/gpu.md lists the tensors of --inputs");
    c = read_step_inputs(inputs, stdit3_config(deck));
    c.in.timestep = inputs.f32("timestep", {c.x.dim(0)});
    noise = inputs.f32("noise", c.x.shape());
  }
  const std::int64_t B = c.x.dim(0);
  const auto& patch = deck.get<Stdit3Deck>().patch_size;
  const auto patches = [&](int axis) {
    const std::int64_t p = patch[static_cast<std::size_t>(axis)];
    return (c.x.dim(axis + 2) + p - 1) / p;
  };
  double flops = 0;
  for (const std::int64_t length : c.in.captions.lengths)
    flops += 3 * model.forward_flops(patches(0), patches(1) * patches(2), length);

  std::vector<double> seconds, losses;
  ops::Profile profile;
  // A replayed graph calls no operation that could be timed, so a profile runs without.
  StepGraphs graphs(on_cuda() && deck.device.graphs && !request.profile);
  const float share = 1.0f / static_cast<float>(B);
  const Tensor weight = Tensor::from_host(std::span<const float>(&share, 1), {1});
  for (int i = 0; i < request.warmup + request.steps; ++i) {
    if (i == request.warmup && request.profile) ops::set_profile(&profile);
    const double start = now_seconds();
    const DeviceEvent begin = on_cuda() ? device_runtime().record(Stream::compute) : DeviceEvent();
    ops::fill_zero(results);
    params.begin_step([](int) {});
    graphs.run("step", params, [&] {
      Tape tape;
      const Tensor loss = flow_loss(tape, model, c.x, noise, c.in, weight);
      Tensor total = results.slice(0, 1);
      ops::add_sum(loss, total);
      tape.backward();
      params.finish_step();
    });
    Tensor squares = results.slice(1, 2);
    if (deck.train.grad_clip != 0) ops::sum_of_squares(params.grads(), squares, false);
    for (std::size_t b = 0; b < params.buckets().size(); ++b)
      optimizer_step(deck.train, i, squares, optimizer, static_cast<int>(b));
    double taken = now_seconds() - start;
    if (on_cuda()) {
      const DeviceEvent end = device_runtime().record(Stream::compute);
      device_runtime().synchronize(end);
      taken = device_runtime().seconds(begin, end);
    }
    if (i >= request.warmup) seconds.push_back(taken);
    losses.push_back(results.to_host().data<double>()[0] / static_cast<double>(B));
  }
  ops::set_profile(nullptr);

  if (!request.outputs.empty()) save_weights(request.outputs, params);
  if (!request.json.empty()) {
    const nlohmann::ordered_json j{
        {"build", version_line()},
        {"device", on_cuda() ? device_runtime().describe() : describe_cpu()},
        {"threads", threads},
        {"dtype", deck.model.dtype},
        {"seconds", seconds},
        {"loss", losses},
        {"arena_peak_bytes", arena->peak()},
        {"model_flops", flops},
        {"product_flops_per_second", ceiling},
        {"wrong", wrong},
        {"graph_replays", graphs.replays()}};
    std::ofstream out(request.json);
    out << j.dump(2) << '\n';
    WEFT_CHECK(bool(out), Exit::usage, "name a file that can be written", "cannot write {}",
               request.json);
  }
  fmt::print(
      "{}, {}: median {:.4f} s (min {:.4f}, max {:.4f}), {:.3f} TFLOP/s ({:.0f} % of "
      "a plain product's), loss {:.6f} -> {:.6f}, wrong {}\n",
      counted(std::ssize(seconds), "step"), counted(threads, "thread"), upper_median(seconds),
      *std::min_element(seconds.begin(), seconds.end()),
      *std::max_element(seconds.begin(), seconds.end()), flops / upper_median(seconds) * 1e-12,
      100 * flops / upper_median(seconds) / ceiling, losses.front(), losses.back(),
      wrong < 0 ? "-" : "0");
  if (request.profile) print_profile(profile, request.steps, upper_median(seconds));
  return 0;
}

Command bench_step_command() {
  const auto r = std::make_shared<BenchStepRequest>();
  Command c{"step", "a training step on given weights and inputs",
            [r](const Deck& deck, MPI_Comm) { return bench_step(deck, *r); }};
  c.first_rank_only = true;
  c.takes_deck();
  c.option("--weights", r->weights, "safetensors (else fresh ones)");
  c.option("--inputs", r->inputs, "safetensors (else noise)");
  c.option("--shape", r->shape, "without --inputs: clips x latent frames x height x width");
  c.option("--captions", r->captions, "and caption rows a clip");
  c.option("--outputs", r->outputs, "weights after all steps");
  c.option("--steps", r->steps, "timed steps");
  c.option("--warmup", r->warmup, "steps before them");
  c.option("--json", r->json, "file for the results");
  c.option("--profile", r->profile, "time every operation");
  return c;
}

}  // namespace weft
