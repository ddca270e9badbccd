// The VAE in a plan: its times follow from a dry run of its step (train/step_cost.h), or are
// measured on clips of few frames, since everything in it grows with the frames alone.
#include <algorithm>
#include <limits>

#include "core/error.h"
#include "models/video_vae/task.h"
#include "train/measure.h"

namespace weft {
namespace {

// A task whose clips have all their frames, and whose discriminator works from the first step on if
// it works at all.
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

}  // namespace

void VaeTask::check_plan(std::span<const Bucket> buckets, bool) {
  WEFT_CHECK(deck_.parallel.sp == 1, Exit::usage, "set parallel.sp = 1",
             "the VAE's clips cannot be shared by ranks (parallel.sp = {})", deck_.parallel.sp);
  check(buckets);
}

std::int64_t VaeTask::units(const Bucket& b, std::int64_t clips) {
  const std::int64_t side = vae_.pixels_a_latent();
  return clips * vae_.temporal().latent_frames(b.frames) * (b.height / side) * (b.width / side);
}

MeasuredWork VaeTask::measure(const PlannedWork& work, MPI_Comm world) {
  Piece piece(deck_, work.buckets);
  std::vector<MicroBatchCost> costs;
  for (std::size_t i = 0; i < work.buckets.size(); ++i) {
    MicroBatchCost cost;
    if (work.clips[i] > 0) {
      const Bucket& whole = work.buckets[i];
      cost = dry_run_cost(*this, whole, work.clips[i], work.recompute[i], h200_targets());
      const double again = cost.again / (cost.forward + cost.backward);
      // Measures one group of frames and two, whose difference is the time of more frames; all
      // frames if the clip has no more.
      const std::int64_t group = frames_at_once(whole);
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
  return {std::move(costs), time_update(deck_.train, piece.task.params(), world),
          "clips of one and two groups of frames of each bucket's size"};
}

}  // namespace weft
