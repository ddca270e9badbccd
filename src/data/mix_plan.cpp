#include "data/mix_plan.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "core/error.h"

namespace weft {
namespace {

// Epochs whose state is kept. Readers are some epochs ahead of the trainer where they are short.
constexpr std::size_t most_known = 64;

// Tells the order of a part's clips from those of buckets and micro-batches (shuffle()).
std::int64_t list_of(int bucket, std::size_t part) {
  return -2 - (static_cast<std::int64_t>(bucket) << 20) - static_cast<std::int64_t>(part);
}

// The clips [from, from + count) of the endless passes through a part.
void take(const Bucket::Part& part, std::int64_t list, std::int64_t from, std::int64_t count,
          std::uint64_t seed, std::vector<std::int64_t>& clips) {
  std::vector<std::int64_t> order(part.clips);
  while (count > 0) {
    const std::int64_t pass = from / part.clips, at = from % part.clips;
    const std::int64_t n = std::min(count, part.clips - at);
    std::iota(order.begin(), order.end(), part.begin);
    shuffle(order, seed, pass, list);
    clips.insert(clips.end(), order.begin() + at, order.begin() + at + n);
    from += n;
    count -= n;
  }
}

}  // namespace

Apportionment::Apportionment(std::span<const double> weights)
    : share_(weights.size()), credit_(weights.size()) {
  const double all = std::accumulate(weights.begin(), weights.end(), 0.0);
  WEFT_ASSERT(all > 0);
  constexpr std::int64_t one = std::int64_t{1} << bits;
  for (std::size_t i = 0; i < weights.size(); ++i)
    if (weights[i] > 0)
      share_[i] =
          std::max<std::int64_t>(1, std::llround(weights[i] / all * static_cast<double>(one)));
  // Rounding errors, a few units, go to the largest.
  *std::max_element(share_.begin(), share_.end()) +=
      one - std::accumulate(share_.begin(), share_.end(), std::int64_t{0});
}

std::vector<std::int64_t> Apportionment::deal(std::int64_t total) {
  WEFT_ASSERT(total >= 0 && total < (std::int64_t{1} << 31));
  constexpr std::int64_t one = std::int64_t{1} << bits;
  std::vector<std::int64_t> counts(share_.size());
  std::vector<std::size_t> between;  // whose share of the total is no whole number
  std::int64_t left = total;
  for (std::size_t i = 0; i < share_.size(); ++i) {
    counts[i] = total * share_[i] / one;
    left -= counts[i];
    const std::int64_t rest = total * share_[i] % one;
    credit_[i] += rest;
    if (rest > 0) between.push_back(i);
  }
  std::stable_sort(between.begin(), between.end(),
                   [&](std::size_t a, std::size_t b) { return credit_[a] > credit_[b]; });
  for (std::int64_t k = 0; k < left; ++k) {
    ++counts[between[k]];
    credit_[between[k]] -= one;
  }
  return counts;
}

MixedEpochs::MixedEpochs(std::span<const Bucket> buckets, std::span<const std::int64_t> batch_sizes,
                         std::uint64_t seed)
    : buckets_(buckets), seed_(seed) {
  double all = 0;
  std::vector<double> each;  // micro-batches
  for (std::size_t b = 0; b < buckets.size(); ++b) {
    const Bucket& bucket = buckets[b];
    std::int64_t clips = 0;
    for (const Bucket::Part& p : bucket.parts) clips += p.clips;
    WEFT_ASSERT(clips == bucket.clips);  // whoever left clips out has forgotten the parts
    const std::int64_t size = samples_in_batch(bucket, batch_sizes[b]);
    if (size == 0) continue;
    trained_.push_back(static_cast<int>(b));
    sizes_.push_back(size);
    each.push_back(micro_batches_of(bucket, size));
    all += each.back();
    std::vector<double> samples;
    for (const Bucket::Part& p : bucket.parts) samples.push_back(p.clips > 0 ? p.samples : 0);
    first_.parts.emplace_back(samples);
    first_.position.emplace_back(bucket.parts.size());
  }
  if (each.empty()) return;
  first_.buckets.emplace_back(each);
  // Rounded down, as a bucket's remainder is dropped without a mix: an epoch is no more than what
  // there is. (Sums such as 0.1 + 0.2 must not fall below a whole number.)
  micro_batches_ = std::max<std::int64_t>(1, static_cast<std::int64_t>(all * (1 + 1e-12)));
  WEFT_CHECK(all * static_cast<double>(*std::ranges::max_element(sizes_)) < 0x1p31, Exit::data,
             "split the stores", "an epoch of {:.3g} micro-batches is too long", all);
}

MixedEpochs::Counts MixedEpochs::advance(State& state) const {
  Counts counts;
  const std::vector<std::int64_t> batches = state.buckets.front().deal(micro_batches_);
  for (std::size_t i = 0; i < trained_.size(); ++i) {
    counts.samples.push_back(state.parts[i].deal(batches[i] * sizes_[i]));
    for (std::size_t p = 0; p < counts.samples[i].size(); ++p)
      state.position[i][p] += counts.samples[i][p];
  }
  return counts;
}

MixedEpochs::State MixedEpochs::before(std::int64_t e) {
  auto after = known_.upper_bound(e);
  std::int64_t at = 0;
  State state;
  if (after == known_.begin()) {
    state = first_;
  } else {
    --after;
    at = after->first;
    state = after->second;
  }
  for (; at < e; ++at) advance(state);
  return state;
}

std::vector<MicroBatch> MixedEpochs::epoch(std::int64_t e) {
  State state = before(e);
  const std::vector<std::vector<std::int64_t>> from = state.position;
  known_[e] = state;
  const Counts counts = advance(state);
  known_[e + 1] = std::move(state);
  while (known_.size() > most_known) known_.erase(known_.begin());

  std::vector<MicroBatch> batches;
  for (std::size_t i = 0; i < trained_.size(); ++i) {
    const int b = trained_[i];
    const Bucket& bucket = buckets_[b];
    std::vector<std::int64_t> clips;
    for (std::size_t p = 0; p < bucket.parts.size(); ++p)
      take(bucket.parts[p], list_of(b, p), from[i][p], counts.samples[i][p], seed_, clips);
    shuffle(clips, seed_, e, b);
    for (auto at = clips.begin(); at != clips.end(); at += sizes_[i]) {
      MicroBatch& m = batches.emplace_back();
      m.bucket = b;
      m.clips.assign(at, at + sizes_[i]);
      for (const std::int64_t clip : m.clips) {
        const Bucket::Part& part = bucket.part_of(clip);
        m.samples.push_back(part.first_sample + clip - part.begin);
      }
    }
  }
  shuffle(batches, seed_, e, -1);
  return batches;
}

}  // namespace weft
