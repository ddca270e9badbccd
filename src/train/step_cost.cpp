#include "train/step_cost.h"

#include <algorithm>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>

#include "core/error.h"
#include "core/json.h"
#include "tensor/tensor.h"
#include "train/task.h"

namespace weft {
namespace {

struct DryRun {
  double forward = 0, backward = 0, flops = 0, bytes_sent = 0, all_reduce_bytes = 0;
  int all_reduces = 0;
};

// A dry run of a micro-batch. `schedule`, if wanted, gets for each bucket of gradients when it is
// complete and when its weights are first used.
DryRun dry_run(TrainingTask& task, const Bucket& bucket, std::int64_t clips, double recompute,
               DeviceKind device, const Rates& rates, std::vector<BucketSchedule>* schedule,
               ops::OpWatch* watch = nullptr) {
  const auto arena = Arena::planning(device);
  const ArenaScope scope(*arena);
  LoadedBatch batch;
  batch.what.clips.resize(clips);
  const TrainingWork work = task.prepare(bucket, batch, Tensor(), recompute, 1.0f);

  // Only now, for what prepare() does is not the step's: clips are made one after the other, and
  // the dry run makes one of them.
  OpTimes times(rates, watch);
  ParameterTable& params = task.params();
  const auto count = params.buckets().size();
  // A bucket whose weights are never used is needed last.
  std::vector<double> ready(count, 0), wanted(count, std::numeric_limits<double>::infinity());
  params.begin_step([&](int b) { ready[b] = times.seconds(); });
  if (schedule != nullptr) {
    params.set_arrival([&](int b) {
      wanted[b] = times.seconds();
      params.arrived(b);
    });
    for (int b = 0; b < std::ssize(params.buckets()); ++b) params.on_its_way(b);
  }

  DryRun run;
  double turned = 0;  // where the last part's backward begins
  for (std::size_t i = 0; i < work.parts.size(); ++i) {
    const CountingScope counting(params, i + 1 == work.parts.size());
    Tape tape;
    const double start = times.seconds();
    const TrainingLoss loss = work.parts[i](tape);
    turned = times.seconds();
    run.forward += turned - start;
    tape.backward();
    run.backward += times.seconds() - turned;
  }
  const double end = times.seconds();
  params.finish_step();
  params.begin_step([](int) {});  // the callback refers to locals

  run.flops = times.flops();
  run.bytes_sent = times.bytes_sent();
  run.all_reduces = times.all_reduces();
  run.all_reduce_bytes = times.all_reduce_bytes();
  if (schedule == nullptr) return run;
  for (int b = 0; b < std::ssize(params.buckets()); ++b) params.arrived(b);
  params.set_arrival({});
  for (std::size_t b = 0; b < schedule->size(); ++b) {
    // Gradients computed within the loss (the discriminator's, the 2D decoder's) are ready when the
    // backward begins.
    (*schedule)[b].ready =
        ready[b] >= end ? 1 : std::max(0.0, (ready[b] - turned) / (end - turned));
    (*schedule)[b].needed = std::min(1.0, wanted[b] / turned);
  }
  return run;
}

}  // namespace

Rates h200_targets() {
  return {
      0.92 * 790e12,
      450e12,
      400e12,
      0.85 * 4.3e12,
      0.03,
      "targets for an H200, not measured (92 % of 790 TFLOP/s in products, 450 and 400 TFLOP/s in "
      "attention, 450 TFLOP/s in convolutions, 85 % of 4.3 TB/s, 3 % gaps)",
      450e12};
}

Rates read_rates(const std::string& file) {
  const char* hint =
      "a rates file is JSON with the numbers products, attention_forward, attention_backward "
      "(FLOP/s), "
      "bandwidth (B/s) and gaps (a share), and for the VAE convolutions (FLOP/s)";
  std::ifstream in(file);
  WEFT_CHECK(in.good(), Exit::usage, "name a file that exists", "--rates {} cannot be read", file);
  Rates rates;
  try {
    const nlohmann::json json = parse_json(std::string(std::istreambuf_iterator<char>(in), {}));
    rates.products = json.at("products").get<double>();
    rates.attention_forward = json.at("attention_forward").get<double>();
    rates.attention_backward = json.at("attention_backward").get<double>();
    rates.bandwidth = json.at("bandwidth").get<double>();
    rates.gaps = json.at("gaps").get<double>();
    rates.convolutions = json.value("convolutions", 0.0);
    rates.wide_heads_forward = json.value("wide_heads_forward", 0.0);
    rates.wide_heads_backward = json.value("wide_heads_backward", 0.0);
    rates.fp8_products = json.value("fp8_products", 0.0);
    rates.origin = json.value("origin", "given in " + file);
  } catch (const nlohmann::json::exception& e) {
    throw Error(Exit::usage, fmt::format("--rates {}: {}", file, e.what()), hint, __FILE__,
                __LINE__);
  }
  WEFT_CHECK(rates.products > 0 && rates.attention_forward > 0 && rates.attention_backward > 0 &&
                 rates.bandwidth > 0 && rates.gaps >= 0 && rates.convolutions >= 0 &&
                 rates.wide_heads_forward >= 0 && rates.wide_heads_backward >= 0 &&
                 rates.fp8_products >= 0,
             Exit::usage, hint, "--rates {}: rates are above 0", file);
  return rates;
}

void OpTimes::exchanged(const std::string& collective, double bytes) {
  if (collective == "all_reduce") {
    ++all_reduces_;
    all_reduce_bytes_ += bytes;
  } else {
    bytes_sent_ += bytes;
  }
}

void OpTimes::met(const std::string& name, const ops::Cost& cost, std::span<const Tensor> tensors) {
  if (also_ != nullptr) also_->met(name, cost, tensors);
  using enum ops::Cost::Kind;
  const auto or_else = [](double rate, double other) { return rate > 0 ? rate : other; };
  double rate = 0;
  switch (cost.kind) {
    case memory:
      break;
    case product:
      rate = rates_.products;
      break;
    case fp8_product:
      rate = or_else(rates_.fp8_products, rates_.products);
      break;
    case attention:
      rate = rates_.attention_forward;
      break;
    case attention_backward:
      rate = rates_.attention_backward;
      break;
    case unpacked_attention:
      rate = or_else(rates_.wide_heads_forward, rates_.attention_forward);
      break;
    case unpacked_attention_backward:
      rate = or_else(rates_.wide_heads_backward, rates_.attention_backward);
      break;
    case convolution:
      rate = rates_.convolutions;
  }
  WEFT_CHECK(cost.operations == 0 || rate > 0, Exit::usage, "add \"convolutions\", in FLOP/s",
             "the model's time needs a rate of convolutions, and the rates have none ({})",
             rates_.origin);
  seconds_ +=
      (std::max(cost.operations > 0 ? cost.operations / rate : 0, cost.bytes / rates_.bandwidth) +
       cost.bytes_before / rates_.bandwidth) *
      (1 + rates_.gaps);
  // An attention's backward computes the scores again: 2 of its 10 operations.
  const bool repeats = cost.kind == attention_backward || cost.kind == unpacked_attention_backward;
  flops_ += repeats ? 0.8 * cost.operations : cost.operations;
}

MicroBatchCost dry_run_cost(TrainingTask& task, const Bucket& bucket, std::int64_t clips,
                            double recompute, DeviceKind device, const Rates& rates, double link,
                            ops::OpWatch* watch) {
  if (clips == 0) return {};
  const DryRun once = dry_run(task, bucket, clips, 0, device, rates, nullptr, watch);
  // What is recomputed exchanges again.
  const DryRun whole =
      recompute > 0 ? dry_run(task, bucket, clips, recompute, device, rates, nullptr) : once;
  MicroBatchCost cost;
  cost.forward = once.forward;
  cost.backward = once.backward;
  cost.again = whole.forward + whole.backward - once.forward - once.backward;
  cost.exchange = whole.bytes_sent > 0 ? whole.bytes_sent / link : 0;
  cost.flops = once.flops;
  cost.all_reduces = whole.all_reduces;
  cost.all_reduce_bytes = whole.all_reduce_bytes;
  return cost;
}

std::vector<BucketSchedule> dry_run_schedule(TrainingTask& task, std::span<const Bucket> buckets,
                                             DeviceKind device, const Rates& rates) {
  std::vector<BucketSchedule> all;
  for (const auto& b : task.params().buckets())
    all.push_back({b.end - b.begin, b.bf16_only, 1, 0, b.sharded});
  const auto longest =
      std::max_element(buckets.begin(), buckets.end(), [](const Bucket& a, const Bucket& b) {
        return a.frames * a.height * a.width < b.frames * b.height * b.width;
      });
  dry_run(task, *longest, 1, 0, device, rates, &all);
  return all;
}

}  // namespace weft
