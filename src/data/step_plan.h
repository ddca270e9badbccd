// Which clips a step trains on: a function of (seed, step) alone, whatever the rank count.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <utility>
#include <vector>

#include "config/deck.h"
#include "core/philox.h"
#include "data/clip_source.h"

namespace weft {

// A sample's permanent id: the running number of its clip over all buckets of the source.
using SampleId = std::int64_t;

// How an image is trained on: scaled to this size and flipped left to right, or not. It fills the
// top left corner of its micro-batch's height x width. `draw` seeds all that is done to a picture
// with text (data/text_images/text_view.h).
struct ImageView {
  std::int64_t height = 0, width = 0;
  bool flip = false;
  std::uint64_t draw = 0;
  bool operator==(const ImageView&) const = default;
};

struct MicroBatch {
  int bucket = 0;
  std::vector<std::int64_t> clips;  // indices within the bucket
  std::vector<SampleId> samples;    // the same clips by id
  // The size of a batch of labelled images, and one view a sample. Else 0 and empty.
  std::int64_t height = 0, width = 0;
  std::vector<ImageView> views;
};

// Clips per micro-batch of each bucket: from the entry NAME=CLIPS of train.batch_sizes with the
// longest NAME that is the bucket's name or its beginning up to a dash, else train.batch_size.
// Exit::usage for an entry that is not NAME=CLIPS, that occurs twice, or whose NAME matches no
// bucket (with the nearest name that does).
std::vector<std::int64_t> batch_sizes(const TrainDeck& deck, std::span<const Bucket> buckets);
// The share of each bucket's clips that an epoch trains on: likewise from the entries BUCKET=SHARE
// of data.keep, else 1.
std::vector<double> kept_shares(const DataDeck& deck, std::span<const Bucket> buckets);

// Fisher-Yates by Philox(seed, sample_order, epoch, list). `list` keeps apart what is shuffled in
// one epoch: a bucket's number, or -1 for the micro-batches.
template <class T>
void shuffle(std::vector<T>& items, std::uint64_t seed, std::int64_t epoch, std::int64_t list) {
  const Philox random(seed, Purpose::sample_order, static_cast<std::uint64_t>(epoch),
                      static_cast<std::uint64_t>(list));
  for (std::size_t i = items.size(); i > 1; --i) {
    const auto element = static_cast<std::uint32_t>(i);
    std::swap(items[i - 1], items[random.below(element, element)]);
  }
}

// A function of (seed, step).
class StepPlan {
 public:
  virtual ~StepPlan() = default;
  // The micro-batches of a step. Safe from several threads at once.
  virtual std::vector<MicroBatch> plan(std::int64_t step) const = 0;
  virtual std::int64_t micro_batches_per_epoch() const = 0;
};

class MixedEpochs;  // data/mix_plan.h

// Epoch e shuffles each bucket with Philox(seed, sample_order, e, bucket), cuts it into
// micro-batches of the bucket's batch size (a remainder is dropped, but a bucket smaller than that
// is one smaller batch, so that no clip is lost silently), and shuffles the list of micro-batches.
// Step s takes the micro-batches [s*G, (s+1)*G) of this endless sequence, G = micro_batches per
// step. Where buckets have parts, of several stores or with data.keep, their epochs are those of
// data/mix_plan.h.
class StepPlanner : public StepPlan {
 public:
  StepPlanner(std::span<const Bucket> buckets, std::vector<std::int64_t> batch_sizes,
              std::int64_t micro_batches, std::uint64_t seed);
  // One batch size for all buckets.
  StepPlanner(std::span<const Bucket> buckets, std::int64_t batch_size, std::int64_t micro_batches,
              std::uint64_t seed);
  ~StepPlanner() override;

  std::vector<MicroBatch> plan(std::int64_t step) const override;
  std::int64_t micro_batches_per_epoch() const override { return per_epoch_; }

 private:
  // The caller holds mutex_. The last two epochs are cached: readers are already in the next one
  // while the trainer finishes one.
  const std::vector<MicroBatch>& epoch(std::int64_t e) const;

  std::vector<Bucket> buckets_;
  std::vector<std::int64_t> batch_sizes_;  // [bucket]
  std::int64_t micro_batches_;
  std::uint64_t seed_;
  std::int64_t per_epoch_ = 0;
  std::unique_ptr<MixedEpochs> mix_;  // null without parts
  mutable std::mutex mutex_;          // guards the cache below
  struct Epoch {
    std::int64_t number = -1;
    std::vector<MicroBatch> batches;
  };
  mutable std::array<Epoch, 2> cached_;
};

// Distributes a step's micro-batches: the costliest first to the rank with the least load, the
// lower rank and the earlier micro-batch among equals; then single ones change ranks, or two ranks
// divide theirs anew, until the busiest rank is within 0.5 % of the mean or neither helps it.
// Returns the rank of each micro-batch; the same costs always give the same ranks.
std::vector<int> share_out(std::span<const double> cost, int ranks);
// The costliest first, the earlier among equals.
std::vector<std::size_t> by_cost(std::span<const double> cost);

// How ranks go through a step's micro-batches together: not at all until its end; in pairs within
// some of them (train/task.h, lockstep_ranks); or all in each of them (parallel.zero = 3).
enum class SyncMode { per_step, lockstep, per_micro_batch };
// share_out(), or for ranks in lockstep one micro-batch after the other to each rank. Where all
// meet in each, and some rank has several, they are dealt out by cost, so that those that meet cost
// about the same.
std::vector<int> owners(std::span<const double> cost, int ranks, SyncMode sync);
// The order in which each rank takes its own: that of the plan, or by cost where all meet.
std::vector<std::size_t> order_of(std::span<const double> cost, SyncMode sync);

}  // namespace weft
