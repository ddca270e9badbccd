// STDiT3 in a plan: its times follow from closed formulas (plan/step_model.h), or from one and two pairs of its blocks at the
// shapes of the deck's buckets.
#include <algorithm>

#include "core/error.h"
#include "models/stdit3/options.h"
#include "models/stdit3/task.h"
#include "plan/planned_model.h"

namespace weft {
namespace {

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

class PlannedStdit3 : public PlannedModel {
 public:
  explicit PlannedStdit3(const Deck& deck) : deck_(deck), task_(deck) {}

  TrainingTask& task() override { return task_; }

  void check(std::span<const Bucket> buckets, bool local) override {
    const auto sp = static_cast<int>(deck_.parallel.sp);
    for (const Bucket& b : buckets) {
      task_.check(b, sp);
      encodes_ = encodes_ || task_.latents().encodes(b);
    }
    WEFT_CHECK(!encodes_ || !local, Exit::usage,
               "plan with the store that `weft encode` makes, or describe a machine (--fabric)",
               "--fabric local measures the model alone, and {} is to be encoded while training",
               deck_.data.path);
    // The last rank has the largest share.
    if (sp > 1) task_.model().plan_sequence_group(sp - 1, sp);
  }

  std::vector<BucketSchedule> schedule(std::span<const Bucket>) override {
    return bucket_schedule(task_.params(), stdit3_config(deck_));
  }

  std::size_t other_weights() const override {
    return encodes_ ? task_.latents().weight_bytes() : 0;
  }

  double bytes_beside_clip() const override {
    if (deck_.data.text_features.empty()) return 0;
    return 2.0 * static_cast<double>(deck_.get<Stdit3Deck>().model_max_length *
                                     deck_.get<Stdit3Deck>().caption_channels);
  }

  std::string unit() const override { return "tokens"; }
  std::int64_t units(const Bucket& bucket, std::int64_t clips) override {
    return shape_of(stdit3_config(deck_), task_.latents().seen(bucket), clips, 0).tokens();
  }

  std::vector<MicroBatchCost> costs(const PlannedWork& work, const Rates& rates,
                                    double link_bandwidth) override {
    std::vector<MicroBatchCost> costs;
    for (std::size_t i = 0; i < work.buckets.size(); ++i)
      costs.push_back(
          micro_batch_cost(stdit3_config(deck_),
                           shape_of(stdit3_config(deck_), task_.latents().seen(work.buckets[i]),
                                    work.clips[i], work.memory[i].recompute),
                           rates, static_cast<int>(deck_.parallel.sp), link_bandwidth));
    return costs;
  }

  LocalMeasurement measure(const PlannedWork& work, MPI_Comm world) override {
    // A measured micro-batch is one rank's own: what sharing its tokens takes is not measured.
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
        MicroBatchShape shape = shape_of(stdit3_config(deck_), b, 1, 0);
        const std::int64_t clips =
            std::clamp<std::int64_t>(enough_tokens / shape.tokens(), 1, work.clips[i]);
        const MeasuredTimes t1 = time_micro_batch(one.task, b, clips, world);
        const MeasuredTimes t2 = time_micro_batch(two.task, b, clips, world);
        const double scale = static_cast<double>(work.clips[i]) / static_cast<double>(clips);
        const double pair = t2.forward - t1.forward;
        cost.forward = scale * (t1.forward + (depth - 1) * pair);
        cost.backward = scale * (t1.backward + (depth - 1) * (t2.backward - t1.backward));
        cost.again = scale * depth * pair * work.memory[i].recompute;
        shape.clips = work.clips[i];
        cost.flops = micro_batch_cost(stdit3_config(deck_), shape, h200_targets()).flops;
      }
      costs.push_back(cost);
    }
    return measure_local(deck_, two.task.params(), std::move(costs),
                         "one and two pairs of blocks at each bucket's shape", world);
  }

 private:
  const Deck& deck_;
  Stdit3Task task_;
  bool encodes_ = false;
};

}  // namespace

std::unique_ptr<PlannedModel> planned_stdit3(const Deck& deck) {
  return std::make_unique<PlannedStdit3>(deck);
}

std::unique_ptr<PlannedModel> planned_model(const Deck& deck) {
  if (deck.model.name == "vae") return planned_vae(deck);
  WEFT_CHECK(deck.model.name == "stdit3", Exit::usage, "set model.name to \"stdit3\" or \"vae\"",
             "weft plan knows no training of model.name = \"{}\"", deck.model.name);
  return planned_stdit3(deck);
}

}  // namespace weft
