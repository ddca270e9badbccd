#include "data/step_plan.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <bit>
#include <charconv>
#include <map>
#include <numeric>
#include <optional>
#include <set>
#include <utility>

#include "config/deck_table.h"
#include "core/error.h"
#include "data/mix_plan.h"

namespace weft {

void ClipSource::read_sample(const MicroBatch& what, std::size_t i,
                             std::span<std::byte> out) const {
  read(what.bucket, what.clips[i], out);
}

void ClipSource::take_next(MicroBatch& what, std::size_t i) const {
  const std::int64_t index = what.clips[i];
  const Bucket& bucket = buckets()[what.bucket];
  if (bucket.parts.empty()) {
    what.clips[i] = (index + 1) % bucket.clips;
  } else {
    const Bucket::Part& part = bucket.part_of(index);
    what.clips[i] = part.begin + (index + 1 - part.begin) % part.clips;
  }
  what.samples[i] += what.clips[i] - index;
}

std::int64_t ClipSource::sample_id(int bucket, std::int64_t index) const {
  const Bucket& own = buckets()[bucket];
  if (!own.parts.empty()) {
    const Bucket::Part& part = own.part_of(index);
    return part.first_sample + index - part.begin;
  }
  for (int b = 0; b < bucket; ++b) index += buckets()[b].clips;
  return index;
}

std::size_t ClipSource::clip_bytes(const MicroBatch& what) const {
  const Bucket& b = buckets()[what.bucket];
  return what.views.empty() ? b.clip_bytes() : b.clip_bytes(what.height, what.width);
}

std::unique_ptr<StepPlan> ClipSource::plan_steps(std::vector<std::int64_t> batch_sizes,
                                                 std::int64_t micro_batches,
                                                 std::uint64_t seed) const {
  return std::make_unique<StepPlanner>(buckets(), std::move(batch_sizes), micro_batches, seed);
}

namespace {

// A key whose entries are NAME=VALUE, for buckets.
template <class T>
struct BucketKey {
  const char* key;
  const char* form;  // "NAME=CLIPS"
  const char* hint;
  T least, most;
};

// [bucket] The value of the entry with the longest NAME that is the bucket's name or its beginning,
// else `otherwise`.
template <class T>
std::vector<T> values_of_buckets(const BucketKey<T>& of, std::span<const std::string> texts,
                                 std::span<const Bucket> buckets, T otherwise) {
  std::map<std::string, T> entries;
  for (const std::string& entry : texts) {
    const auto equals = entry.rfind('=');
    const std::string name = entry.substr(0, equals);
    const std::string text = equals == std::string::npos ? "" : entry.substr(equals + 1);
    T value = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    // This form of the comparison refuses nan too.
    WEFT_CHECK(!name.empty() && error == std::errc() && end == text.data() + text.size() &&
                   value >= of.least && value <= of.most,
               Exit::usage, std::is_integral_v<T> ? of.hint : number_hint(text, of.hint),
               "{} has \"{}\", which is not {}", of.key, entry, of.form);
    WEFT_CHECK(entries.emplace(name, value).second, Exit::usage, "leave one of them out",
               "{} names \"{}\" twice", of.key, name);
  }

  std::vector<T> values;
  std::set<std::string> names, unused;  // known beginnings; entries that match no bucket
  for (const auto& [name, value] : entries) unused.insert(name);
  for (const Bucket& b : buckets) {
    values.push_back(otherwise);
    // Beginnings from the shortest to the whole name, so that the longest wins.
    for (std::size_t dash = 0; dash != std::string::npos;) {
      dash = b.name.find('-', dash + 1);
      const std::string name = b.name.substr(0, dash);
      names.insert(name);
      unused.erase(name);
      if (const auto found = entries.find(name); found != entries.end())
        values.back() = found->second;
    }
  }
  if (!unused.empty()) {
    const std::string& name = *unused.begin();
    const std::string near = nearest_name(name, {names.begin(), names.end()});
    throw Error(Exit::usage,
                fmt::format("{} names \"{}\", and no bucket of the data does", of.key, name),
                near.empty() ? fmt::format("there are buckets {}", fmt::join(names, ", "))
                             : fmt::format("did you mean \"{}\"?", near),
                __FILE__, __LINE__);
  }
  return values;
}

}  // namespace

std::vector<std::int64_t> batch_sizes(const TrainDeck& deck, std::span<const Bucket> buckets) {
  return values_of_buckets<std::int64_t>(
      {"train.batch_sizes", "NAME=CLIPS",
       "write a bucket's name or its beginning and a number of clips, like \"256-51=20\"", 1,
       1'000'000},
      deck.batch_sizes, buckets, deck.batch_size);
}

std::vector<double> kept_shares(const DataDeck& deck, std::span<const Bucket> buckets) {
  return values_of_buckets<double>(
      {"data.keep", "BUCKET=SHARE",
       "write a bucket's name or its beginning and a share from 0 to 1, like \"256-51=0.5\"", 0, 1},
      deck.keep, buckets, 1);
}

StepPlanner::StepPlanner(std::span<const Bucket> buckets, std::int64_t batch_size,
                         std::int64_t micro_batches, std::uint64_t seed)
    : StepPlanner(buckets, std::vector<std::int64_t>(buckets.size(), batch_size), micro_batches,
                  seed) {}

StepPlanner::StepPlanner(std::span<const Bucket> buckets, std::vector<std::int64_t> batch_sizes,
                         std::int64_t micro_batches, std::uint64_t seed)
    : buckets_(buckets.begin(), buckets.end()),
      batch_sizes_(std::move(batch_sizes)),
      micro_batches_(micro_batches),
      seed_(seed) {
  WEFT_ASSERT(batch_sizes_.size() == buckets_.size());
  WEFT_CHECK(micro_batches >= 1, Exit::usage, "set train.micro_batches to 1 or more",
             "{} micro-batches a step", micro_batches);
  for (std::size_t i = 0; i < buckets_.size(); ++i) {
    const Bucket& b = buckets_[i];
    WEFT_CHECK(batch_sizes_[i] >= 1, Exit::usage, "set train.batch_size to 1 or more",
               "a micro-batch of {} clips", batch_sizes_[i]);
    // Philox::below draws 32-bit numbers.
    WEFT_CHECK(b.clips < (std::int64_t{1} << 32), Exit::data, "split the clip store",
               "bucket {} has {} clips, more than 2^32", b.name, b.clips);
    if (b.clips > 0) per_epoch_ += std::max<std::int64_t>(1, b.clips / batch_sizes_[i]);
  }
  if (std::ranges::any_of(buckets_, [](const Bucket& b) { return !b.parts.empty(); })) {
    mix_ = std::make_unique<MixedEpochs>(buckets_, batch_sizes_, seed_);
    per_epoch_ = mix_->micro_batches();
  }
  WEFT_CHECK(per_epoch_ > 0, Exit::data, "check data.path and what `weft ingest` put in it",
             "no clip to train on in {} buckets", buckets_.size());
}

StepPlanner::~StepPlanner() = default;

const std::vector<MicroBatch>& StepPlanner::epoch(std::int64_t e) const {
  Epoch& cached = cached_[e % 2];
  if (e == cached.number) return cached.batches;
  cached.batches.clear();
  if (mix_) {
    cached.batches = mix_->epoch(e);
    cached.number = e;
    return cached.batches;
  }
  SampleId first = 0;  // id of the bucket's first clip
  for (std::size_t b = 0; b < buckets_.size(); ++b) {
    const std::int64_t clips = buckets_[b].clips;
    std::vector<std::int64_t> order(clips);
    std::iota(order.begin(), order.end(), 0);
    shuffle(order, seed_, e, static_cast<std::int64_t>(b));
    const std::int64_t size = std::min(batch_sizes_[b], clips);
    // The dropped remainder differs from epoch to epoch, because the cut comes after the shuffle.
    for (std::int64_t at = 0; size > 0 && at + size <= clips; at += size) {
      MicroBatch m;
      m.bucket = static_cast<int>(b);
      m.clips.assign(order.begin() + at, order.begin() + at + size);
      for (const std::int64_t clip : m.clips) m.samples.push_back(first + clip);
      cached.batches.push_back(std::move(m));
    }
    first += clips;
  }
  shuffle(cached.batches, seed_, e, -1);
  cached.number = e;
  return cached.batches;
}

std::vector<MicroBatch> StepPlanner::plan(std::int64_t step) const {
  WEFT_ASSERT(step >= 0);
  std::lock_guard lock(mutex_);
  std::vector<MicroBatch> out;
  for (std::int64_t i = step * micro_batches_; i < (step + 1) * micro_batches_; ++i) {
    const auto& batches = epoch(i / per_epoch_);
    WEFT_ASSERT(static_cast<std::int64_t>(batches.size()) == per_epoch_);
    out.push_back(batches[i % per_epoch_]);
  }
  return out;
}

namespace {

// Loads within this factor of the mean are even enough: costs are not known any better.
constexpr double even_enough = 1.005;

constexpr std::size_t most_divided = 16;     // micro-batches: 2^15 ways
constexpr std::ptrdiff_t most_partners = 8;  // the least busy

// The micro-batches of the busiest rank and one of the least busy, divided so that the greater of
// the two loads is the least possible. False if that lowers the busiest load with none of them.
bool divide_anew(std::span<const double> cost, std::size_t busiest, std::vector<double>& load,
                 std::vector<std::vector<std::size_t>>& has, std::vector<int>& rank_of) {
  std::vector<std::size_t> order(load.size());
  std::iota(order.begin(), order.end(), 0);
  const auto partners = std::min(std::ssize(order), most_partners);
  std::partial_sort(
      order.begin(), order.begin() + partners, order.end(),
      [&](std::size_t a, std::size_t b) { return std::pair(load[a], a) < std::pair(load[b], b); });
  double best = load[busiest] * (1 - 1e-9);
  std::size_t partner = load.size();
  std::uint32_t taken = 0;  // by the busiest, of both ranks' micro-batches
  std::vector<std::size_t> both;
  const auto joined = [&](std::size_t r) {
    both = has[busiest];
    both.insert(both.end(), has[r].begin(), has[r].end());
  };
  for (std::ptrdiff_t k = 0; k < partners; ++k) {
    const std::size_t r = order[k];
    if (r == busiest || has[busiest].size() + has[r].size() > most_divided) continue;
    joined(r);
    const double all = load[busiest] + load[r];
    // Every choice of those after the first, which stays where it is; each differs from the one
    // before in a single micro-batch (Gray code).
    double sum = cost[both[0]];
    std::uint32_t choice = 1;
    for (std::uint32_t i = 1; i < std::uint32_t{1} << (both.size() - 1); ++i) {
      const auto changed = static_cast<std::size_t>(std::countr_zero(i)) + 1;
      choice ^= std::uint32_t{1} << changed;
      sum += (choice >> changed & 1) != 0 ? cost[both[changed]] : -cost[both[changed]];
      const double greater = std::max(sum, all - sum);
      if (greater < best) best = greater, partner = r, taken = choice;
    }
  }
  if (partner == load.size()) return false;
  joined(partner);
  for (const std::size_t r : {busiest, partner}) {
    has[r].clear();
    load[r] = 0;
  }
  for (std::size_t i = 0; i < both.size(); ++i) {
    const std::size_t r = (taken >> i & 1) != 0 ? busiest : partner;
    has[r].push_back(both[i]);
    load[r] += cost[both[i]];
    rank_of[both[i]] = static_cast<int>(r);
  }
  return true;
}

// Longest-first places its last micro-batches wherever they fit, which with eight per rank leaves
// loads some 5 % apart. So while the busiest rank has more than enough, it gives one micro-batch
// away, or swaps one for a cheaper one, wherever that lowers the greater of the two loads most; the
// first trade that leaves both even enough is taken. The busiest load falls each time, so the loop
// ends.
// Where no such trade helps, the busiest and another rank divide all that they have anew
// (divide_anew).
void trade(std::span<const double> cost, std::vector<double>& load, std::vector<int>& rank_of) {
  std::vector<std::vector<std::size_t>> has(load.size());
  for (std::size_t i = 0; i < cost.size(); ++i) has[rank_of[i]].push_back(i);
  const double goal = std::accumulate(load.begin(), load.end(), 0.0) /
                      static_cast<double>(load.size()) * even_enough;
  // The search resumes where the last one ended: the ranks before have mostly been ruled out.
  for (std::size_t first = 0;;) {
    const auto busiest =
        static_cast<std::size_t>(std::max_element(load.begin(), load.end()) - load.begin());
    if (load[busiest] <= goal) return;
    // The margin of 1e-9 rejects trades that gain only rounding error, so that the loop ends.
    double best = load[busiest] * (1 - 1e-9), moved = 0;
    std::size_t partner = load.size(), given = 0;
    std::optional<std::size_t> taken;
    const auto consider = [&](std::size_t r, std::size_t give, std::optional<std::size_t> take) {
      const double difference = cost[give] - (take ? cost[*take] : 0);
      if (difference <= 0) return;
      const double greater = std::max(load[busiest] - difference, load[r] + difference);
      if (greater < best)
        best = greater, partner = r, given = give, taken = take, moved = difference;
    };
    for (std::size_t k = 0; k < load.size() && best > goal; ++k) {
      const std::size_t r = (first + k) % load.size();
      if (load[r] >= best) continue;  // the busiest too
      for (const std::size_t give : has[busiest]) {
        consider(r, give, std::nullopt);
        for (const std::size_t take : has[r]) consider(r, give, take);
      }
    }
    if (partner == load.size()) {
      if (!divide_anew(cost, busiest, load, has, rank_of)) return;
      continue;
    }
    first = partner;
    const auto move = [&](std::size_t i, std::size_t from, std::size_t to) {
      std::erase(has[from], i);
      has[to].push_back(i);
      rank_of[i] = static_cast<int>(to);
    };
    move(given, busiest, partner);
    if (taken) move(*taken, partner, busiest);
    load[busiest] -= moved;
    load[partner] += moved;
  }
}

}  // namespace

std::vector<std::size_t> by_cost(std::span<const double> cost) {
  std::vector<std::size_t> order(cost.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](std::size_t a, std::size_t b) { return cost[a] > cost[b]; });
  return order;
}

std::vector<int> share_out(std::span<const double> cost, int ranks) {
  WEFT_ASSERT(ranks >= 1);
  const std::vector<std::size_t> order = by_cost(cost);
  std::vector<double> load(ranks, 0);
  std::vector<int> rank_of(cost.size());
  for (const std::size_t i : order) {
    const auto least = std::min_element(load.begin(), load.end());  // the first among equals
    *least += cost[i];
    rank_of[i] = static_cast<int>(least - load.begin());
  }
  if (ranks > 1) trade(cost, load, rank_of);
  return rank_of;
}

std::vector<int> owners(std::span<const double> cost, int ranks, SyncMode sync) {
  const bool one_each = cost.size() <= static_cast<std::size_t>(ranks);
  if (sync == SyncMode::per_step || (sync == SyncMode::per_micro_batch && one_each))
    return share_out(cost, ranks);
  const std::vector<std::size_t> order = order_of(cost, sync);
  std::vector<int> turns(cost.size());
  for (std::size_t k = 0; k < turns.size(); ++k)
    turns[order[k]] = static_cast<int>(k % static_cast<std::size_t>(ranks));
  return turns;
}

std::vector<std::size_t> order_of(std::span<const double> cost, SyncMode sync) {
  if (sync == SyncMode::per_micro_batch) return by_cost(cost);
  std::vector<std::size_t> order(cost.size());
  std::iota(order.begin(), order.end(), 0);
  return order;
}

}  // namespace weft
