#include "models/stdit3/cost.h"

#include <algorithm>
#include <cmath>

#include "core/error.h"
#include "models/stdit3/task.h"
#include "train/measure.h"

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

// Forward of one block whose attention reaches over `reach` tokens. v is the size in bytes of one
// [N,C] tensor of this rank; how often each operation reads or writes one is counted in
// docs/plan.md, Traffic of a block.
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

// Its backward: two products for each of the forward's, and 2.5 times its attention operations;
// 67 v in all at a ratio of 4.
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

// A parameter's block in the order of the forward, 0 to 2 depth - 1; -1 before the blocks, 2 depth
// after them.
std::int64_t block_of(const std::string& name, std::int64_t depth) {
  const auto index = [&](const std::string& prefix) -> std::int64_t {
    return name.rfind(prefix, 0) == 0 ? std::stoll(name.substr(prefix.size())) : -1;
  };
  if (const auto i = index("spatial_blocks."); i >= 0) return 2 * i;
  if (const auto i = index("temporal_blocks."); i >= 0) return 2 * i + 1;
  return name.rfind("final_layer.", 0) == 0 ? 2 * depth : -1;
}

constexpr std::int64_t enough_tokens = 16384;  // of a measured micro-batch, if one clip has less

// A model with few pairs of blocks, its weights, its gradients.
struct Piece {
  Deck deck;
  Stdit3Task task;
  Piece(const Deck& whole, std::int64_t depth) : deck(whole), task(shortened(deck, depth)) {
    allocate_for_measuring(task, whole);
  }
  static const Deck& shortened(Deck& deck, std::int64_t depth) {
    deck.get<Stdit3Deck>().depth = depth;
    deck.data.text_features.clear();  // null captions are as long as the longest
    return deck;
  }
};

}  // namespace

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

  // Work before and after the blocks: patches, captions, final layer.
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

  // Between a spatial and a temporal block the cut axis changes: twice a pair, and as often in the
  // backward.
  if (sp > 1 && exchange_bandwidth > 0)
    cost.exchange = depth * 4 * element * C * N * (sp - 1) / sp / exchange_bandwidth;
  return cost;
}

std::vector<BucketSchedule> bucket_schedule(const ParameterTable& table,
                                            const Stdit3Config& model) {
  const std::int64_t blocks = 2 * model.depth;
  // Elements of each block, and how many of them precede a parameter in the forward. They stand for
  // time: products take most of it, in proportion to their weights.
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
    // The share of the forward that is done when p is used; the backward completes p's gradient at
    // the same place.
    double at = block < 0 ? 0 : 1;
    if (block >= 0 && block < blocks)
      at = (static_cast<double>(block) + before[i] / total[static_cast<std::size_t>(block)]) /
           static_cast<double>(blocks);
    BucketSchedule& b = schedule[static_cast<std::size_t>(p.bucket)];
    b.ready = std::max(b.ready, 1 - at);
    b.needed = std::min(b.needed, at);
  }
  // Buckets are reduced in order: none is sent before those ahead of it.
  for (std::size_t i = 1; i < schedule.size(); ++i)
    schedule[i].ready = std::max(schedule[i].ready, schedule[i - 1].ready);
  return schedule;
}

void Stdit3Task::check_plan(std::span<const Bucket> buckets, bool local) {
  const auto sp = static_cast<int>(deck_.parallel.sp);
  for (const Bucket& b : buckets) {
    check(b, sp);
    encodes_ = encodes_ || latents_.encodes(b);
  }
  WEFT_CHECK(!encodes_ || !local, Exit::usage,
             "plan with the store that `weft encode` makes, or describe a machine (--fabric)",
             "--fabric local measures the model alone, and {} is to be encoded while training",
             deck_.data.path);
  // The last rank has the largest share.
  if (sp > 1) model_.plan_sequence_group(sp - 1, sp);
}

std::vector<BucketSchedule> Stdit3Task::schedule(std::span<const Bucket>) {
  return bucket_schedule(params(), model_.config());
}

std::size_t Stdit3Task::other_weights() const { return encodes_ ? latents_.weight_bytes() : 0; }

double Stdit3Task::bytes_beside_clip() const {
  if (deck_.data.text_features.empty()) return 0;
  const Stdit3Config& m = model_.config();
  return 2.0 * static_cast<double>(m.model_max_length * m.caption_channels);
}

std::int64_t Stdit3Task::units(const Bucket& bucket, std::int64_t clips) {
  return shape_of(model_.config(), latents_.seen(bucket), clips, 0).tokens();
}

std::vector<MicroBatchCost> Stdit3Task::costs(const PlannedWork& work, const Rates& rates,
                                              double link_bandwidth) {
  std::vector<MicroBatchCost> costs;
  for (std::size_t i = 0; i < work.buckets.size(); ++i)
    costs.push_back(micro_batch_cost(
        model_.config(),
        shape_of(model_.config(), latents_.seen(work.buckets[i]), work.clips[i], work.recompute[i]),
        rates, static_cast<int>(deck_.parallel.sp), link_bandwidth));
  return costs;
}

MeasuredWork Stdit3Task::measure(const PlannedWork& work, MPI_Comm world) {
  // A micro-batch is measured on one rank alone: the cost of sharing its tokens is not.
  WEFT_CHECK(deck_.parallel.sp == 1, Exit::usage,
             "describe the machine (--fabric), or plan without parallel.sp",
             "--fabric local with parallel.sp = {}", deck_.parallel.sp);
  Piece one(deck_, 1), two(deck_, 2);
  const auto depth = static_cast<double>(deck_.get<Stdit3Deck>().depth);
  std::vector<MicroBatchCost> costs;
  for (std::size_t i = 0; i < work.buckets.size(); ++i) {
    MicroBatchCost cost;
    if (work.clips[i] > 0) {
      const Bucket& b = work.buckets[i];
      MicroBatchShape shape = shape_of(model_.config(), b, 1, 0);
      const std::int64_t clips =
          std::clamp<std::int64_t>(enough_tokens / shape.tokens(), 1, work.clips[i]);
      const MeasuredTimes t1 = time_micro_batch(one.task, b, clips, world);
      const MeasuredTimes t2 = time_micro_batch(two.task, b, clips, world);
      const double scale = static_cast<double>(work.clips[i]) / static_cast<double>(clips);
      // The difference of the two depths is one pair; what does not grow with depth cancels out.
      const double pair = t2.forward - t1.forward;
      cost.forward = scale * (t1.forward + (depth - 1) * pair);
      cost.backward = scale * (t1.backward + (depth - 1) * (t2.backward - t1.backward));
      cost.again = scale * depth * pair * work.recompute[i];
      shape.clips = work.clips[i];
      cost.flops = micro_batch_cost(model_.config(), shape, h200_targets()).flops;
    }
    costs.push_back(cost);
  }
  return {std::move(costs), time_update(deck_.train, two.task.params(), world),
          "one and two pairs of blocks at each bucket's shape"};
}

namespace {

// A clip of latent frames of h x w, with a caption of full length.
MicroBatchShape sampling_shape(const Stdit3Config& model, std::int64_t frames, std::int64_t h,
                               std::int64_t w) {
  const auto ceil_div = [](std::int64_t a, std::int64_t b) { return (a + b - 1) / b; };
  const std::vector<std::int64_t>& patch = model.patch_size;
  MicroBatchShape shape;
  shape.T = ceil_div(frames, patch[0]);
  shape.S = ceil_div(h, patch[1]) * ceil_div(w, patch[2]);
  shape.L = model.model_max_length;
  return shape;
}

}  // namespace

double Stdit3::flops(std::int64_t frames, std::int64_t h, std::int64_t w) const {
  const MicroBatchShape shape = sampling_shape(config_, frames, h, w);
  return forward_flops(shape.T, shape.S, shape.L);
}

double Stdit3::seconds(std::int64_t clips, std::int64_t frames, std::int64_t h, std::int64_t w,
                       const Rates& rates, int ranks, double link) const {
  MicroBatchShape shape = sampling_shape(config_, frames, h, w);
  shape.clips = clips;
  const MicroBatchCost cost = micro_batch_cost(config_, shape, rates, ranks, link);
  // A third of a step's exchanges are the forward's.
  return cost.forward + cost.exchange / 3;
}

}  // namespace weft
