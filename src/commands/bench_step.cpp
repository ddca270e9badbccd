#include "commands/bench_step.h"

#include <algorithm>
#include <fstream>
#include <nlohmann/json.hpp>

#include "commands/probe_case.h"
#include "core/clock.h"
#include "core/device.h"
#include "core/error.h"
#include "core/version.h"
#include "models/weights.h"
#include "ops/loss.h"
#include "ops/optimizer.h"
#include "ops/pointwise.h"
#include "parallel/rank_device.h"
#include "train/memory_plan.h"
#include "train/optimizer.h"
#include "train/step_graphs.h"

namespace weft {
namespace {

double median(std::vector<double> v) {
  std::sort(v.begin(), v.end());
  return v[v.size() / 2];
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

}  // namespace

int bench_step(const Deck& deck, const BenchStepRequest& request) {
  WEFT_CHECK(request.steps >= 1 && request.warmup >= 0, Exit::usage, "--steps is at least 1",
             "{} steps, {} to warm up", request.steps, request.warmup);
  choose_device(deck.device.kind, true, MPI_COMM_SELF);
  const int threads = set_threads(static_cast<int>(deck.run.threads), 1);
  Stdit3 model(deck.model);
  ParameterTable& params = model.params();
  params.allocate(static_cast<std::int64_t>(deck.parallel.bucket_mib * (1 << 20) / 4),
                  deck.model.dtype == "bf16", true);
  load_weights(request.weights, params);
  OptimizerState optimizer(params);
  Tensor results = Tensor::persistent({2}, DType::f64);  // loss sum, squared gradient norm
  const auto arena = Arena::reserve(arena_capacity(deck.memory, 1));
  const ArenaScope scope(*arena);
  const ProbeInputs inputs(request.inputs);
  ProbeCase c = read_case(inputs, deck.model);
  const std::int64_t B = c.x.dim(0);
  c.in.timestep = inputs.f32("timestep", {B});
  const Tensor noise = inputs.f32("noise", c.x.shape());

  std::vector<double> seconds, losses;
  ops::Profile profile;
  StepGraphs graphs(on_cuda() && deck.device.graphs && !request.profile);
  for (int i = 0; i < request.warmup + request.steps; ++i) {
    if (i == request.warmup && request.profile) ops::set_profile(&profile);
    const double start = now_seconds();
    const DeviceEvent begin = on_cuda() ? device_runtime().record(Stream::compute) : DeviceEvent();
    ops::fill_zero(results);
    params.begin_step([](int) {});
    graphs.run("step", params, [&] {
      Tape tape;
      const Tensor loss = flow_loss(tape, model, c.x, noise, c.in, 1.0f / static_cast<float>(B));
      Tensor total = results.slice(0, 1);
      ops::add_sum(loss, total);
      tape.backward();
      params.finish_step();
    });
    Tensor squares = results.slice(1, 2);
    if (deck.train.grad_clip > 0) ops::sum_of_squares(params.grads(), squares);
    optimizer_step(deck.train, i, squares, params, optimizer);
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
        {"build", version_line()}, {"device", on_cuda() ? device_runtime().describe() : describe_cpu()},
        {"threads", threads},      {"dtype", deck.model.dtype},
        {"seconds", seconds},      {"loss", losses},     {"arena_peak_bytes", arena->peak()}};
    std::ofstream out(request.json);
    out << j.dump(2) << '\n';
    WEFT_CHECK(bool(out), Exit::usage, "name a file that can be written", "cannot write {}",
               request.json);
  }
  fmt::print(
      "{} steps, {} threads: median {:.4f} s (min {:.4f}, max {:.4f}), loss {:.6f} -> {:.6f}\n",
      seconds.size(), threads, median(seconds), *std::min_element(seconds.begin(), seconds.end()),
      *std::max_element(seconds.begin(), seconds.end()), losses.front(), losses.back());
  if (request.profile) print_profile(profile, request.steps, median(seconds));
  return 0;
}

}  // namespace weft
