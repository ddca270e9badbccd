// The VAE in a plan: its step is walked through an arena without memory, operation by operation (plan/op_times.h), or
// measured on clips of few frames, since everything in it grows with the frames alone.
#include <algorithm>
#include <limits>

#include "core/error.h"
#include "models/video_vae/options.h"
#include "models/video_vae/task.h"
#include "plan/op_times.h"
#include "plan/planned_model.h"
#include "tensor/arena.h"

namespace weft {
namespace {

// A task whose clips have all their frames, and whose discriminator works from the first step on if it works at all.
struct Piece {
  Deck deck;
  VaeTask task;
  Piece(const Deck& whole, std::span<const Bucket> buckets) : deck(whole), task(lengthened(deck)) {
    task.check(buckets);
    allocate_for_measuring(task, whole);
  }
  static const Deck& lengthened(Deck& deck) {
    VaeTrainDeck& v = deck.get<VaeTrainDeck>();
    v.image_share = 0;
    v.random_length = false;
    v.discriminator_start =
        deck.train.steps > v.discriminator_start ? 0 : std::numeric_limits<std::int64_t>::max();
    return deck;
  }
};

class PlannedVae : public PlannedModel {
 public:
  explicit PlannedVae(const Deck& deck) : deck_(deck), task_(deck) {
    WEFT_CHECK(deck.parallel.sp == 1, Exit::usage, "set parallel.sp = 1",
               "the VAE's clips cannot be shared by ranks (parallel.sp = {})", deck.parallel.sp);
  }

  TrainingTask& task() override { return task_; }
  void check(std::span<const Bucket> buckets, bool) override { task_.check(buckets); }
  std::size_t other_weights() const override { return task_.lpips_bytes(); }

  std::vector<BucketSchedule> schedule(std::span<const Bucket> buckets) override {
    std::vector<BucketSchedule> all;
    for (const auto& b : task_.params().buckets())
      all.push_back({b.end - b.begin, b.bf16_only, 1, 0});
    // The shares are those of the bucket whose clips are longest: they hardly depend on it.
    const auto longest =
        std::max_element(buckets.begin(), buckets.end(), [](const Bucket& a, const Bucket& b) {
          return a.frames * a.height * a.width < b.frames * b.height * b.width;
        });
    walk(*longest, 1, 0, h200_targets(), &all);
    return all;
  }

  std::string unit() const override { return "latents"; }
  std::int64_t units(const Bucket& b, std::int64_t clips) override {
    const std::int64_t side = task_.model().pixels_a_latent();
    return clips * task_.model().temporal().latent_frames(b.frames) * (b.height / side) *
           (b.width / side);
  }

  std::vector<MicroBatchCost> costs(const PlannedWork& work, const Rates& rates, double) override {
    std::vector<MicroBatchCost> costs;
    for (std::size_t i = 0; i < work.buckets.size(); ++i)
      costs.push_back(work.clips[i] == 0 ? MicroBatchCost()
                                         : cost_of(work.buckets[i], work.clips[i],
                                                   work.memory[i].recompute, rates));
    return costs;
  }

  LocalMeasurement measure(const PlannedWork& work, MPI_Comm world) override {
    Piece piece(deck_, work.buckets);
    std::vector<MicroBatchCost> costs;
    for (std::size_t i = 0; i < work.buckets.size(); ++i) {
      MicroBatchCost cost;
      if (work.clips[i] > 0) {
        const Bucket& whole = work.buckets[i];
        cost = cost_of(whole, work.clips[i], work.memory[i].recompute, h200_targets());
        const double again = cost.again / (cost.forward + cost.backward);
        // One group of frames and two, or all frames where there are no more.
        const std::int64_t group = task_.frames_at_once(whole);
        Bucket some = whole;
        some.frames = std::min(whole.frames, 2 * group);
        const MeasuredTimes t2 = time_micro_batch(piece.task, some, 1, world);
        double a_frame_forward = 0, a_frame_backward = 0;
        if (some.frames < whole.frames) {
          some.frames = group;
          const MeasuredTimes t1 = time_micro_batch(piece.task, some, 1, world);
          a_frame_forward = (t2.forward - t1.forward) / static_cast<double>(group);
          a_frame_backward = (t2.backward - t1.backward) / static_cast<double>(group);
        }
        const auto clips = static_cast<double>(work.clips[i]);
        const auto more = static_cast<double>(whole.frames - std::min(whole.frames, 2 * group));
        cost.forward = clips * (t2.forward + more * a_frame_forward);
        cost.backward = clips * (t2.backward + more * a_frame_backward);
        cost.again = again * (cost.forward + cost.backward);
      }
      costs.push_back(cost);
    }
    return measure_local(deck_, piece.task.params(), std::move(costs),
                         "clips of one and two groups of frames of each bucket's size", world);
  }

 private:
  struct Walked {
    double forward = 0, backward = 0, flops = 0;
  };

  // A micro-batch walked through; `schedule`: when the gradients of each bucket are complete, and when its weights are wanted.
  Walked walk(const Bucket& bucket, std::int64_t clips, double recompute, const Rates& rates,
              std::vector<BucketSchedule>* schedule) {
    const auto arena = Arena::planning();
    const ArenaScope scope(*arena);
    OpTimes times(rates);
    LoadedBatch batch;
    batch.what.clips.resize(static_cast<std::size_t>(clips));
    ParameterTable& params = task_.params();
    const auto count = params.buckets().size();
    // Weights that are never used are wanted last.
    std::vector<double> ready(count, 0), wanted(count, std::numeric_limits<double>::infinity());
    params.begin_step([&](int b) { ready[static_cast<std::size_t>(b)] = times.seconds(); });
    params.set_arrival([&](int b) {
      wanted[static_cast<std::size_t>(b)] = times.seconds();
      params.arrived(b);
    });
    if (schedule != nullptr)
      for (int b = 0; b < std::ssize(params.buckets()); ++b) params.on_its_way(b);
    const TrainingWork work = task_.prepare(bucket, batch, Tensor(), recompute);
    Walked w;
    double turned = 0;  // where the last part's backward begins
    for (std::size_t i = 0; i < work.parts.size(); ++i) {
      params.set_counting(i + 1 == work.parts.size());
      Tape tape;
      const double start = times.seconds();
      const TrainingLoss loss = work.parts[i](tape, 1.0f);
      turned = times.seconds();
      w.forward += turned - start;
      tape.backward();
      w.backward += times.seconds() - turned;
    }
    const double end = times.seconds();
    params.finish_step();
    for (int b = 0; b < std::ssize(params.buckets()); ++b) params.arrived(b);
    params.set_arrival({});
    params.begin_step([](int) {});
    w.flops = times.flops();
    if (schedule == nullptr) return w;
    for (std::size_t b = 0; b < schedule->size(); ++b) {
      // What has a gradient in the loss itself (the discriminator, the 2D decoder) is ready as the backward begins.
      (*schedule)[b].ready =
          ready[b] >= end ? 1 : std::max(0.0, (ready[b] - turned) / (end - turned));
      (*schedule)[b].needed = std::min(1.0, wanted[b] / turned);
    }
    return w;
  }

  MicroBatchCost cost_of(const Bucket& bucket, std::int64_t clips, double recompute,
                         const Rates& rates) {
    const Walked once = walk(bucket, clips, 0, rates, nullptr);
    MicroBatchCost cost;
    cost.forward = once.forward;
    cost.backward = once.backward;
    if (recompute > 0) {
      const Walked more = walk(bucket, clips, recompute, rates, nullptr);
      cost.again = more.forward + more.backward - once.forward - once.backward;
    }
    cost.flops = once.flops;
    return cost;
  }

  const Deck& deck_;
  VaeTask task_;
};

}  // namespace

std::unique_ptr<PlannedModel> planned_vae(const Deck& deck) {
  return std::make_unique<PlannedVae>(deck);
}

}  // namespace weft
