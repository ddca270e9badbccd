#include "data/images/image_plan.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "core/error.h"
#include "core/philox.h"

namespace weft {
namespace {

// Fisher-Yates. `list` keeps apart the images of an epoch (0) and the steps of a stretch (1).
template <class T>
void shuffle(std::vector<T>& items, std::uint64_t seed, std::int64_t number, std::uint64_t list) {
  const Philox random(seed, Purpose::sample_order, static_cast<std::uint64_t>(number), list);
  for (std::size_t i = items.size(); i > 1; --i) {
    const auto element = static_cast<std::uint32_t>(i);
    std::swap(items[i - 1], items[random.below(element, element)]);
  }
}

}  // namespace

ImagePlan::ImagePlan(std::vector<ImageSize> sizes, ImagePlanOptions options)
    : sizes_(std::move(sizes)), options_(std::move(options)) {
  WEFT_CHECK(options_.batch_size >= 1, Exit::usage, "set train.batch_size to 1 or more",
             "a micro-batch of {} images", options_.batch_size);
  WEFT_CHECK(options_.micro_batches >= 1, Exit::usage, "set train.micro_batches to 1 or more",
             "{} micro-batches a step", options_.micro_batches);
  WEFT_CHECK(!options_.short_sides.empty(), Exit::usage, "set data.short_sides = [300, 450, 600]",
             "data.short_sides is empty");
  WEFT_ASSERT(!sizes_.empty());
  for (std::size_t i = 0; i < sizes_.size(); ++i) {
    auto& images = orientations_[orientation_of(sizes_[i])].images;
    position_.push_back(std::ssize(images));
    images.push_back(static_cast<std::int64_t>(i));
  }
  int bucket = 0;
  for (Orientation& o : orientations_) {
    if (o.images.empty()) continue;
    o.first_bucket = bucket;
    bucket += static_cast<int>(options_.short_sides.size());
  }
  // Of 512 steps or more: over one epoch of 20,000 images, the largest step of 128 micro-batches
  // would have a spread of 5 %. The limit bounds the memory of a stretch.
  constexpr std::int64_t least_steps = 512, limit = 1 << 16;
  const std::int64_t G = options_.micro_batches;
  stretch_steps_ = std::max<std::int64_t>(
      1, std::max(micro_batches_per_epoch(), std::min(least_steps * G, limit)) / G);
}

std::int64_t ImagePlan::micro_batches_per_epoch() const {
  return std::max<std::int64_t>(1, std::ssize(sizes_) / options_.batch_size);
}

std::int64_t ImagePlan::before_epoch(std::int64_t epoch) const {
  std::int64_t sum = 0;
  for (const Orientation& o : orientations_)
    sum += epoch * std::ssize(o.images) / options_.batch_size;
  return sum;
}

std::int64_t ImagePlan::epoch_of(std::int64_t micro_batch) const {
  // At most so many micro-batches precede an epoch; rounding makes it two fewer at most.
  std::int64_t e =
      std::max<std::int64_t>(0, micro_batch * options_.batch_size / std::ssize(sizes_) - 1);
  while (before_epoch(e + 1) <= micro_batch) ++e;
  return e;
}

std::vector<std::int64_t> ImagePlan::order(std::int64_t epoch) const {
  std::vector<std::int64_t> images(sizes_.size());
  std::iota(images.begin(), images.end(), 0);
  shuffle(images, options_.seed, epoch, 0);
  return images;
}

std::vector<MicroBatch> ImagePlan::walk(std::int64_t epoch) const {
  const std::int64_t batch = options_.batch_size;
  std::array<std::vector<std::int64_t>, 2> bins;
  // What the epochs before left over, oldest first. An orientation with fewer images than a
  // micro-batch collects them over several epochs.
  std::array<std::int64_t, 2> missing{};
  for (std::size_t o = 0; o < 2; ++o)
    missing[o] = epoch * std::ssize(orientations_[o].images) % batch;
  for (std::int64_t e = epoch - 1; missing[0] + missing[1] > 0; --e) {
    const std::vector<std::int64_t> images = order(e);
    for (auto i = images.rbegin(); i != images.rend(); ++i) {
      const std::size_t o = orientation_of(sizes_[static_cast<std::size_t>(*i)]);
      if (missing[o] == 0) continue;
      --missing[o];
      bins[o].push_back(*i);
    }
  }
  for (auto& bin : bins) std::reverse(bin.begin(), bin.end());

  std::vector<MicroBatch> batches;
  const std::int64_t first = before_epoch(epoch);
  for (const std::int64_t image : order(epoch)) {
    const std::size_t o = orientation_of(sizes_[static_cast<std::size_t>(image)]);
    bins[o].push_back(image);
    if (std::ssize(bins[o]) < batch) continue;
    MicroBatch& b = batches.emplace_back();
    b.samples = std::exchange(bins[o], {});
    for (const std::int64_t s : b.samples)
      b.clips.push_back(position_[static_cast<std::size_t>(s)]);
    size_up(b, o, first + std::ssize(batches) - 1);
  }
  return batches;
}

void ImagePlan::size_up(MicroBatch& batch, std::size_t orientation, std::int64_t number) const {
  const Philox random(options_.seed, Purpose::image_view, 0, static_cast<std::uint64_t>(number));
  const std::uint32_t which =
      random.below(0, static_cast<std::uint32_t>(options_.short_sides.size()));
  batch.bucket = orientations_[orientation].first_bucket + static_cast<int>(which);
  for (std::size_t i = 0; i < batch.samples.size(); ++i) {
    const ImageSize size = training_size(sizes_[static_cast<std::size_t>(batch.samples[i])],
                                         options_.short_sides[which], options_.max_side);
    batch.views.push_back(
        {size.height, size.width, random.below(static_cast<std::uint32_t>(i + 1), 2) == 1});
  }
  const ImageSize size = micro_batch_size(batch.views, options_.padding);
  batch.height = size.height;
  batch.width = size.width;
}

std::vector<MicroBatch> ImagePlan::stretch(std::int64_t number) const {
  const std::int64_t G = options_.micro_batches, count = stretch_steps_ * G;
  const std::int64_t first = number * count;
  std::vector<MicroBatch> all;
  for (std::int64_t e = epoch_of(first); before_epoch(e) < first + count; ++e) {
    const std::int64_t begin = before_epoch(e);
    std::vector<MicroBatch> part = walk(e);
    for (std::size_t i = 0; i < part.size(); ++i) {
      const std::int64_t n = begin + static_cast<std::int64_t>(i);
      if (n >= first && n < first + count) all.push_back(std::move(part[i]));
    }
  }
  WEFT_ASSERT(std::ssize(all) == count);
  std::stable_sort(all.begin(), all.end(), [](const MicroBatch& a, const MicroBatch& b) {
    return a.height * a.width < b.height * b.width;
  });
  std::vector<std::int64_t> steps(static_cast<std::size_t>(stretch_steps_));
  std::iota(steps.begin(), steps.end(), 0);
  shuffle(steps, options_.seed, number, 1);
  std::vector<MicroBatch> shuffled;
  shuffled.reserve(all.size());
  for (const std::int64_t s : steps)
    std::move(all.begin() + s * G, all.begin() + (s + 1) * G, std::back_inserter(shuffled));
  return shuffled;
}

const std::vector<MicroBatch>& ImagePlan::cached(std::int64_t number) const {
  Cached& c = cache_[static_cast<std::size_t>(number) % cache_.size()];
  if (c.number != number) {
    c.batches = options_.balanced ? stretch(number) : walk(number);
    c.number = number;
  }
  return c.batches;
}

std::vector<MicroBatch> ImagePlan::plan(std::int64_t step) const {
  const std::int64_t G = options_.micro_batches;
  std::vector<MicroBatch> out;
  const std::lock_guard lock(mutex_);
  if (options_.balanced) {
    const auto& batches = cached(step / stretch_steps_);
    const auto first = batches.begin() + step % stretch_steps_ * G;
    return {first, first + G};
  }
  std::int64_t number = step * G;
  for (std::int64_t e = epoch_of(number); std::ssize(out) < G; ++e) {
    const auto& batches = cached(e);
    for (std::int64_t i = number - before_epoch(e); i < std::ssize(batches) && std::ssize(out) < G;
         ++i, ++number)
      out.push_back(batches[static_cast<std::size_t>(i)]);
  }
  return out;
}

}  // namespace weft
