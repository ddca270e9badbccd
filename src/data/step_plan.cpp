#include "data/step_plan.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "core/error.h"
#include "core/philox.h"

namespace weft {
namespace {

// Fisher-Yates. `list` keeps the shuffles of one epoch apart: the bucket's number, or -1 for the
// list of micro-batches.
template <class T>
void shuffle(std::vector<T>& items, std::uint64_t seed, std::int64_t epoch, std::int64_t list) {
  const Philox random(seed, Purpose::sample_order, static_cast<std::uint64_t>(epoch),
                      static_cast<std::uint64_t>(list));
  for (std::size_t i = items.size(); i > 1; --i) {
    const std::uint32_t element = static_cast<std::uint32_t>(i);
    std::swap(items[i - 1], items[random.below(element, element)]);
  }
}

}  // namespace

StepPlanner::StepPlanner(std::span<const Bucket> buckets, std::int64_t batch_size,
                         std::int64_t micro_batches, std::uint64_t seed)
    : buckets_(buckets.begin(), buckets.end()),
      batch_size_(batch_size),
      micro_batches_(micro_batches),
      seed_(seed) {
  WEFT_CHECK(batch_size >= 1, Exit::usage, "set train.batch_size to 1 or more",
             "a micro-batch of {} clips", batch_size);
  WEFT_CHECK(micro_batches >= 1, Exit::usage, "set train.micro_batches to 1 or more",
             "{} micro-batches a step", micro_batches);
  for (const Bucket& b : buckets_) {
    // Philox::below draws 32-bit numbers.
    WEFT_CHECK(b.clips < (std::int64_t{1} << 32), Exit::data, "split the clip store",
               "bucket {} has {} clips, more than 2^32", b.name, b.clips);
    if (b.clips > 0) per_epoch_ += std::max<std::int64_t>(1, b.clips / batch_size);
  }
  WEFT_CHECK(per_epoch_ > 0, Exit::data, "check data.path and what `weft ingest` put in it",
             "there is no clip to train on in {} buckets", buckets_.size());
}

const std::vector<MicroBatch>& StepPlanner::epoch(std::int64_t e) const {
  if (e == cached_epoch_) return cached_;
  cached_.clear();
  SampleId first = 0;  // id of the bucket's first clip
  for (std::size_t b = 0; b < buckets_.size(); ++b) {
    const std::int64_t clips = buckets_[b].clips;
    std::vector<std::int64_t> order(static_cast<std::size_t>(clips));
    std::iota(order.begin(), order.end(), 0);
    shuffle(order, seed_, e, static_cast<std::int64_t>(b));
    const std::int64_t size = std::min(batch_size_, clips);
    // The remainder differs from epoch to epoch, because the cut comes after the shuffle.
    for (std::int64_t at = 0; size > 0 && at + size <= clips; at += size) {
      MicroBatch m;
      m.bucket = static_cast<int>(b);
      m.clips.assign(order.begin() + at, order.begin() + at + size);
      for (const std::int64_t clip : m.clips) m.samples.push_back(first + clip);
      cached_.push_back(std::move(m));
    }
    first += clips;
  }
  shuffle(cached_, seed_, e, -1);
  cached_epoch_ = e;
  return cached_;
}

std::vector<MicroBatch> StepPlanner::plan(std::int64_t step) const {
  WEFT_ASSERT(step >= 0);
  std::lock_guard lock(mutex_);
  std::vector<MicroBatch> out;
  for (std::int64_t i = step * micro_batches_; i < (step + 1) * micro_batches_; ++i) {
    const auto& batches = epoch(i / per_epoch_);
    WEFT_ASSERT(static_cast<std::int64_t>(batches.size()) == per_epoch_);
    out.push_back(batches[static_cast<std::size_t>(i % per_epoch_)]);
  }
  return out;
}

std::vector<int> share_out(std::span<const double> cost, int ranks) {
  WEFT_ASSERT(ranks >= 1);
  std::vector<std::size_t> order(cost.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](std::size_t a, std::size_t b) { return cost[a] > cost[b]; });
  std::vector<double> load(static_cast<std::size_t>(ranks), 0);
  std::vector<int> rank_of(cost.size());
  for (const std::size_t i : order) {
    const auto least = std::min_element(load.begin(), load.end());  // the first among equals
    *least += cost[i];
    rank_of[i] = static_cast<int>(least - load.begin());
  }
  return rank_of;
}

}  // namespace weft
