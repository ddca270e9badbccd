#include "plan/step_model.h"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>
#include <utility>

#include "core/error.h"
#include "core/json.h"
#include "models/stdit3/options.h"

namespace weft {
namespace {

// Time of operations, one after the other.
struct Sum {
  const Rates& rates;
  double seconds = 0;
  double model_flops = 0;

  // `flops` at `rate`, or `bytes` through memory, whichever takes longer.
  void add(double flops, double rate, double bytes) {
    seconds += std::max(flops > 0 ? flops / rate : 0.0, bytes / rates.bandwidth) * (1 + rates.gaps);
  }
  void product(double flops, double bytes) {
    model_flops += flops;
    add(flops, rates.products, bytes);
  }
};

// Forward of one block whose attention reaches over `reach` tokens. v is the size in bytes of one [N,C] tensor of this rank;
// how often each operation reads or writes one is counted in performance study B4.
void block_forward(Sum& s, double C, double hidden, double N, double reach, double L, double rows,
                   double element) {
  const double v = element * C * N, f = hidden / C;
  s.add(0, 1, 2 * v);               // normalise and modulate
  s.product(6 * C * C * N, 4 * v);  // q, k, v
  s.model_flops += 4 * reach * C * N;
  s.add(4 * reach * C * N, s.rates.attention_forward, 4 * v);
  s.product(2 * C * C * N, 3 * v);                      // out, gate, residual
  s.product(2 * C * C * N, 2 * v);                      // cross attention: q
  s.product(4 * C * C * rows, element * C * rows * 3);  // its k, v
  s.model_flops += 4 * L * C * N;
  s.add(4 * L * C * N, s.rates.attention_forward, 2 * v);
  s.product(2 * C * C * N, 3 * v);             // its out, residual
  s.add(0, 1, 2 * v);                          // normalise and modulate
  s.product(2 * C * hidden * N, (1 + f) * v);  // fc1 and GELU
  s.product(2 * C * hidden * N, (2 + f) * v);  // fc2, gate, residual
}

// Its backward: two products for each, attention 2.5 times its forward's operations; 67 v in all at a ratio of 4.
void block_backward(Sum& s, double C, double hidden, double N, double reach, double L, double rows,
                    double element) {
  const double v = element * C * N, f = hidden / C;
  s.add(0, 1, 8 * v);                // both normalisations
  s.product(12 * C * C * N, 8 * v);  // q, k, v
  s.add(10 * reach * C * N, s.rates.attention_backward, 8 * v);
  s.product(4 * C * C * N, 4 * v);
  s.product(4 * C * C * N, 4 * v);
  s.product(8 * C * C * rows, element * C * rows * 6);
  s.add(10 * L * C * N, s.rates.attention_backward, 4 * v);
  s.product(4 * C * C * N, 4 * v);
  s.product(4 * C * hidden * N, (2 + 2 * f) * v);
  s.product(4 * C * hidden * N, (2 + 3 * f) * v);  // with GELU's derivative
  s.add(0, 1, 3 * v);                              // gates
}

// Where a parameter stands in the forward: its block among the 2 depth, or before (-1) or behind them.
std::int64_t block_of(const std::string& name, std::int64_t depth) {
  const auto index = [&](const std::string& prefix) -> std::int64_t {
    return name.rfind(prefix, 0) == 0 ? std::stoll(name.substr(prefix.size())) : -1;
  };
  if (const auto i = index("spatial_blocks."); i >= 0) return 2 * i;
  if (const auto i = index("temporal_blocks."); i >= 0) return 2 * i + 1;
  return name.rfind("final_layer.", 0) == 0 ? 2 * depth : -1;
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
    rates.origin = json.value("origin", "given in " + file);
  } catch (const nlohmann::json::exception& e) {
    throw Error(Exit::usage, fmt::format("--rates {}: {}", file, e.what()), hint, __FILE__,
                __LINE__);
  }
  WEFT_CHECK(rates.products > 0 && rates.attention_forward > 0 && rates.attention_backward > 0 &&
                 rates.bandwidth > 0 && rates.gaps >= 0 && rates.convolutions >= 0,
             Exit::usage, hint, "--rates {}: rates are above 0", file);
  return rates;
}

MicroBatchShape shape_of(const Stdit3Config& model, const Bucket& bucket, std::int64_t clips,
                         double recompute) {
  const auto patches = [](std::int64_t size, std::int64_t p) { return (size + p - 1) / p; };
  const auto& p = model.patch_size;
  return {clips, patches(bucket.frames, p[0]),
          patches(bucket.height, p[1]) * patches(bucket.width, p[2]), model.model_max_length,
          recompute};
}

MicroBatchCost micro_batch_cost(const Stdit3Config& model, const MicroBatchShape& shape,
                                const Rates& rates, int sp, double exchange_bandwidth) {
  const double C = static_cast<double>(model.hidden_size), hidden = std::floor(C * model.mlp_ratio);
  const double L = static_cast<double>(shape.L), S = static_cast<double>(shape.S),
               T = static_cast<double>(shape.T), depth = static_cast<double>(model.depth);
  // Tokens are divided among the ranks that share the clips, captions are not.
  const double N = static_cast<double>(shape.tokens()) / sp;
  const double rows = static_cast<double>(shape.clips) * L;
  const double element = model.dtype == "bf16" ? 2 : 4;

  Sum forward{rates}, backward{rates};
  for (const double reach : {S, T}) {
    block_forward(forward, C, hidden, N, reach, L, rows, element);
    block_backward(backward, C, hidden, N, reach, L, rows, element);
  }
  MicroBatchCost cost;
  cost.again = depth * forward.seconds * shape.recompute;
  cost.forward = depth * forward.seconds;
  cost.backward = depth * backward.seconds;

  // What stands before and behind the blocks: patches, captions, final layer.
  const double patch =
      static_cast<double>(model.patch_size[0] * model.patch_size[1] * model.patch_size[2]);
  const double channels = static_cast<double>(model.in_channels) * (model.pred_sigma ? 3 : 2);
  const double tokens = 2 * C * N * patch * channels;
  const double captions =
      model.skip_y_embedder ? 0
                            : 2 * rows * (static_cast<double>(model.caption_channels) * C + C * C);
  Sum ends{rates};
  ends.product(tokens, 8 * element * C * N);
  ends.product(captions, element * rows * (static_cast<double>(model.caption_channels) + 4 * C));
  cost.forward += ends.seconds;
  cost.backward += 2 * ends.seconds;
  cost.flops = 3 * (depth * forward.model_flops + ends.model_flops);

  // Between a spatial and a temporal block the cut axis changes: twice a pair, and as often in the backward.
  if (sp > 1 && exchange_bandwidth > 0)
    cost.exchange = depth * 4 * element * C * N * (sp - 1) / sp / exchange_bandwidth;
  return cost;
}

std::vector<BucketSchedule> bucket_schedule(const ParameterTable& table,
                                            const Stdit3Config& model) {
  const std::int64_t blocks = 2 * model.depth;
  // Elements of each block, and how many of them come before a parameter in the forward: products take most of the time, and
  // theirs is proportional to their weights.
  std::vector<double> total(static_cast<std::size_t>(blocks), 0), before;
  for (const auto& p : table.all()) {
    const std::int64_t block = block_of(p->name, model.depth);
    const bool inside = block >= 0 && block < blocks;
    before.push_back(inside ? total[static_cast<std::size_t>(block)] : 0);
    if (inside) total[static_cast<std::size_t>(block)] += static_cast<double>(p->shape.numel());
  }
  std::vector<BucketSchedule> schedule;
  for (const auto& b : table.buckets()) schedule.push_back({b.end - b.begin, b.bf16_only, 0, 1});
  for (std::size_t i = 0; i < before.size(); ++i) {
    const Parameter& p = *table.all()[i];
    if (!p.trainable) continue;
    const std::int64_t block = block_of(p.name, model.depth);
    // The share of the forward that is done when p is used: its gradient is complete when the backward comes by again.
    double at = block < 0 ? 0 : 1;
    if (block >= 0 && block < blocks)
      at = (static_cast<double>(block) + before[i] / total[static_cast<std::size_t>(block)]) /
           static_cast<double>(blocks);
    BucketSchedule& b = schedule[static_cast<std::size_t>(p.bucket)];
    b.ready = std::max(b.ready, 1 - at);
    b.needed = std::min(b.needed, at);
  }
  // A bucket goes on the wire after all before it.
  for (std::size_t i = 1; i < schedule.size(); ++i)
    schedule[i].ready = std::max(schedule[i].ready, schedule[i - 1].ready);
  return schedule;
}

int CommModel::nodes() const { return (ranks + machine.ranks_a_node - 1) / machine.ranks_a_node; }

double CommModel::reduce_scatter(double bytes) const {
  if (ranks <= 1) return 0;
  const double all = ranks, inside = std::min(ranks, machine.ranks_a_node), outside = nodes();
  const double link_part = (inside - 1) / inside * bytes / machine.link_bandwidth;
  const double links = (inside - 1) * machine.link_latency;
  if (nodes() == 1) return links + link_part;
  if (!hierarchical) {
    // The ring's slowest stretch is the one between nodes, or the links where cards are faster than those.
    const double bandwidth = std::min(machine.node_bandwidth(), machine.link_bandwidth * inside);
    return (all - 1) / all * bytes / bandwidth + (all - outside) * machine.link_latency +
           outside * machine.card_latency;
  }
  const double card_part = (outside - 1) / outside * bytes / machine.node_bandwidth();
  return std::max(link_part, card_part) + links + (outside - 1) * machine.card_latency;
}

double CommModel::all_gather(double bytes) const {
  return reduce_scatter(bytes) / machine.gather_factor;
}

StepTime step_time(std::span<const MicroBatchCost> work, std::span<const BucketSchedule> buckets,
                   const CommModel& comm, const ParallelDeck& parallel, bool bf16_model,
                   double optimizer_bandwidth) {
  StepTime t;
  for (const MicroBatchCost& m : work) t.compute += m.seconds();

  // 1. Gradients, one bucket after the other as the last backward completes them.
  const double backward =
      work.empty() ? 0 : work.back().backward + work.back().again + work.back().exchange / 2;
  const double wire = parallel.wire == "bf16" ? 2 : 4;
  double end = 0, elements = 0;
  for (const BucketSchedule& b : buckets) {
    const double bytes = wire * static_cast<double>(b.elements);
    const double takes = parallel.zero == 1 ? comm.reduce_scatter(bytes) : comm.all_reduce(bytes);
    end = std::max(end, b.ready * backward) + takes;
    t.reduce += takes;
    elements += static_cast<double>(b.elements);
  }
  t.exposed_reduce = parallel.overlap ? std::max(0.0, end - backward) : t.reduce;

  // 2. The update of this rank's share.
  t.optimizer = elements / (parallel.zero == 1 ? comm.ranks : 1) * optimizer_bytes_an_element /
                optimizer_bandwidth;
  if (parallel.zero != 1) return t;

  // 3. New weights, last bucket first: roughly the order in which the next forward needs them.
  const double forward = work.empty() ? 0 : work.front().forward + work.front().exchange / 2;
  std::vector<std::pair<double, double>>
      weights;  // needed at this share of the forward, here at this time
  for (auto b = buckets.rbegin(); b != buckets.rend(); ++b) {
    t.gather += comm.all_gather((bf16_model && b->bf16_only ? 2.0 : 4.0) *
                                static_cast<double>(b->elements));
    weights.emplace_back(b->needed, t.gather);
  }
  std::sort(weights.begin(), weights.end());
  double now = 0, at = 0;  // since the update; `at`: share of the forward that is done
  for (const auto& [needed, arrived] : weights) {
    now += (needed - at) * forward;
    at = needed;
    t.exposed_gather += std::max(0.0, arrived - now);
    now = std::max(now, arrived);
  }
  if (!parallel.overlap) t.exposed_gather = t.gather;
  return t;
}

double expected_maximum(int n) {
  // E[max] = integral of x d(Phi(x)^n).
  const auto normal = [](double x) { return 0.5 * std::erfc(-x / std::sqrt(2.0)); };
  double sum = 0, before = 0;
  constexpr double from = -9, step = 1e-3;
  for (int i = 1; i <= 18000; ++i) {
    const double after = std::pow(normal(from + i * step), n);
    sum += (from + (i - 0.5) * step) * (after - before);
    before = after;
  }
  return sum;
}

}  // namespace weft
