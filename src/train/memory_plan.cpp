#include "train/memory_plan.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <map>
#include <sstream>

#include "core/error.h"
#include "core/host.h"
#include "core/log.h"
#include "core/parts.h"

namespace weft {
namespace {

// `count` blocks as a share of all. The model rounds share * blocks up to whole blocks: one ulp
// less keeps rounding errors from adding a block.
double share_of(std::int64_t count, std::int64_t blocks) {
  if (count == 0) return 0;
  return std::nextafter(static_cast<double>(count) / static_cast<double>(blocks), 0.0);
}

// The smallest x in [low, high] with fits(x). Requires fits(high), and that fits(x) implies
// fits(x + 1).
template <class Fits>
std::int64_t smallest(std::int64_t low, std::int64_t high, const Fits& fits) {
  while (low < high) {
    const std::int64_t middle = low + (high - low) / 2;
    if (fits(middle))
      high = middle;
    else
      low = middle + 1;
  }
  return high;
}

// The keys to set so that every bucket fits. `largest`: the clips of a batch that do (0: not even
// one).
std::string keys_that_fit(std::span<const Bucket> buckets, std::span<const std::int64_t> largest) {
  if (buckets.front().label_rate > 0)  // images have one batch size
    return fmt::format(
        "set train.batch_size = {}, or lower {}",
        std::max<std::int64_t>(1, *std::min_element(largest.begin(), largest.end())),
        buckets.front().holds_text() ? "data.crop" : "data.short_sides and data.max_side");
  std::string none, list;
  for (std::size_t i = 0; i < buckets.size(); ++i) {
    if (samples_in_batch(buckets[i], 1) == 0) continue;
    if (largest[i] == 0) none += (none.empty() ? "" : ", ") + buckets[i].name;
    list += fmt::format("{}\"{}={}\"", list.empty() ? "" : ", ", buckets[i].name, largest[i]);
  }
  if (!none.empty())
    return fmt::format(
        "not even one clip fits of {}: share its tokens over ranks (parallel.sp), leave the bucket "
        "out, or give the ranks more memory (fewer ranks a host, memory.arena_gib)",
        none);
  return fmt::format(
      "these are the largest batches that fit: train.batch_sizes = [{}]. Or share a clip's tokens "
      "over ranks (parallel.sp)",
      list);
}

struct PlannedRun {
  MemoryNeed need;
  std::size_t kept = 0;  // optional activations, at most the budget
};
PlannedRun dry_run(TrainingTask& task, const Bucket& bucket, std::int64_t batch_size,
                   double recompute, DeviceKind device, std::size_t capacity, std::size_t budget) {
  const auto arena = Arena::planning(device, capacity);
  const ArenaScope scope(*arena);
  TrainingWork work = dry_work(task, bucket, batch_size, recompute);
  work.kept = budget;
  task.params().begin_step([](int) {});
  // As in all micro-batches of a step but the first, whose kernels need no room to add in.
  for (const auto& p : task.params().all()) p->grad_written = !p->sharded;
  const std::size_t kept = run_parts(work, task.params(), false, [](const TrainingLoss&) {});
  return {arena->need(), kept};
}

// `plain` with as many optional activations kept as fit into `usable` bytes: all of them, or what
// bisection finds in eight more dry runs.
StepMemory with_kept(TrainingTask& task, const Bucket& bucket, std::int64_t batch_size,
                     DeviceKind device, std::size_t usable, const StepMemory& plain) {
  StepMemory best = plain;
  const auto fits = [&](std::size_t budget) {
    const PlannedRun run =
        dry_run(task, bucket, batch_size, plain.recompute, device, usable, budget);
    if (!run.need.fits || run.need.bytes > usable) return false;
    best = {plain.recompute, run.need.bytes, run.kept};
    return true;
  };
  constexpr std::size_t all = std::numeric_limits<std::size_t>::max();
  if (fits(all)) return best;
  std::size_t low = 0,
              high = dry_run(task, bucket, batch_size, plain.recompute, device, 0, all).kept;
  for (int i = 0; i < 8 && low < high; ++i) {
    const std::size_t middle = low + (high - low) / 2;
    (fits(middle) ? low : high) = middle;
  }
  return best;
}

}  // namespace

MemoryNeed plan_step_memory(TrainingTask& task, const Bucket& bucket, std::int64_t batch_size,
                            double recompute, DeviceKind device, std::size_t capacity,
                            std::size_t kept) {
  return dry_run(task, bucket, batch_size, recompute, device, capacity, kept).need;
}

std::vector<StepMemory> plan_memory(TrainingTask& task, std::span<const Bucket> buckets,
                                    std::span<const std::int64_t> batch_sizes, std::size_t capacity,
                                    DeviceKind device, bool keep) {
  WEFT_ASSERT(buckets.size() == batch_sizes.size());
  // Shorter captions leave other holes in the arena than the planned ones.
  const std::size_t usable = capacity - capacity / 32;
  std::vector<StepMemory> plan;
  std::vector<std::int64_t> largest(batch_sizes.begin(), batch_sizes.end());
  std::string refusal;
  for (std::size_t i = 0; i < buckets.size(); ++i) {
    const Bucket& bucket = buckets[i];
    if (samples_in_batch(bucket, 1) == 0) {
      plan.emplace_back();
      continue;
    }
    const std::int64_t batch = samples_in_batch(bucket, batch_sizes[i]),
                       blocks = task.blocks(bucket);
    // Rounded up to whole blocks, as in the model.
    const auto at_least = static_cast<std::int64_t>(
        std::ceil(task.least_recompute() * static_cast<double>(blocks) - 1e-9));
    const auto bytes = [&](std::int64_t clips, std::int64_t recomputed) {
      return plan_step_memory(task, bucket, clips, share_of(recomputed, blocks), device).bytes;
    };
    const auto fits = [&](std::int64_t clips, std::int64_t recomputed) {
      const MemoryNeed need =
          plan_step_memory(task, bucket, clips, share_of(recomputed, blocks), device, usable);
      return need.fits && need.bytes <= usable;
    };
    if (fits(batch, at_least)) {
      plan.push_back({share_of(at_least, blocks), bytes(batch, at_least)});
      if (keep && device == DeviceKind::cuda)
        plan.back() = with_kept(task, bucket, batch, device, usable, plan.back());
      continue;
    }
    // The most that can be saved. Recomputing the last block too seldom saves anything: the
    // backward needs its activations first.
    const bool last_pays = at_least == blocks || bytes(batch, blocks) < bytes(batch, blocks - 1);
    const std::int64_t most = last_pays ? blocks : blocks - 1;
    if (!fits(batch, most)) {
      // Every clip adds the same amount, so bisection also finds the largest batch that fits.
      const std::int64_t too_many =
          smallest(1, batch, [&](std::int64_t clips) { return !fits(clips, most); });
      largest[i] = too_many - 1;
      // A bucket of which not even one clip fits is reported first.
      const bool first_without = largest[i] == 0 && std::count(&largest[0], &largest[i], 0) == 0;
      if (refusal.empty() || first_without)
        refusal = fmt::format(
            "a micro-batch of {} of bucket {} needs {} of activations{}, excluding "
            "fragmentation; a rank has {} for them",
            counted(batch, "clip"), bucket.name, size_text(static_cast<double>(bytes(batch, most))),
            blocks > 0 ? " even if every block is recomputed" : "",
            size_text(static_cast<double>(usable)));
      plan.emplace_back();
      continue;
    }
    const std::int64_t recomputed =
        smallest(at_least, most, [&](std::int64_t count) { return fits(batch, count); });
    plan.push_back({share_of(recomputed, blocks), bytes(batch, recomputed)});
  }
  if (!refusal.empty())
    throw Error(Exit::usage, refusal, keys_that_fit(buckets, largest), __FILE__, __LINE__);
  return plan;
}

std::string kept_text(std::span<const StepMemory> plan, std::span<const Bucket> buckets) {
  std::string text;
  for (std::size_t i = 0; i < plan.size(); ++i)
    text += fmt::format("{} {}\n", plan[i].kept, buckets[i].name);
  return text;
}

void keep_as_before(std::vector<StepMemory>& plan, std::span<const Bucket> buckets,
                    const std::string& saved) {
  std::map<std::string, std::size_t> before;
  std::istringstream in(saved);
  std::size_t kept = 0;
  for (std::string name; in >> kept && in.ignore() && std::getline(in, name);) before[name] = kept;
  for (std::size_t i = 0; i < plan.size(); ++i) {
    const auto then = before.find(buckets[i].name);
    if (then == before.end()) continue;
    if (plan[i].kept < then->second)
      log::warn(
          "bucket {} keeps {} of optional activations, {} before the restart: less memory is free, "
          "and results may differ by rounding",
          buckets[i].name, size_text(static_cast<double>(plan[i].kept)),
          size_text(static_cast<double>(then->second)));
    plan[i].kept = std::min(plan[i].kept, then->second);
  }
}

void recompute_alike(TrainingTask& task, std::span<const Bucket> buckets,
                     std::span<const std::int64_t> batch_sizes, std::vector<StepMemory>& plan,
                     DeviceKind device) {
  double most = 0;
  for (const StepMemory& m : plan) most = std::max(most, m.recompute);
  for (std::size_t i = 0; i < plan.size(); ++i)
    if (samples_in_batch(buckets[i], 1) > 0 && plan[i].recompute < most)
      plan[i] = {most,
                 plan_step_memory(task, buckets[i], samples_in_batch(buckets[i], batch_sizes[i]),
                                  most, device)
                     .bytes,
                 0};
}

std::size_t arena_capacity(const MemoryDeck& deck, int ranks_on_host, int ranks) {
  if (deck.arena_gib > 0) return bytes_of_gib(deck.arena_gib);
  // The training state is allocated already.
  if (on_cuda()) return arena_share(device_runtime().free_bytes(), ranks);
  return host_memory().total / static_cast<std::size_t>(ranks_on_host);
}

std::size_t arena_capacity(const MemoryDeck& deck, const RankDevice& device) {
  const std::size_t bytes = arena_capacity(deck, device.host_ranks);
  return device.shared ? bytes / static_cast<std::size_t>(device.host_ranks) : bytes;
}

MemoryKinds state_bytes(const ParameterTable& table, bool bf16, bool sharded, int ranks,
                        bool squares, std::size_t averages) {
  std::size_t fixed = 0, largest = 0;
  MemoryKinds m;
  const std::size_t working = bf16 ? 2 : 4;  // bytes
  for (const ParameterTable::Bucket& b : table.buckets()) {
    const auto elements = static_cast<std::size_t>(b.end - b.begin);
    // The last part takes the remainder: it is the largest.
    const auto part = static_cast<std::size_t>(
        sharded ? part_of(b.begin, b.end, ranks - 1, ranks).size() : b.end - b.begin);
    m.moments += (squares ? 8 : 4) * part;
    m.ema += 4 * averages * part;
    // On one rank nothing is sharded.
    if (b.sharded && ranks > 1) {
      m.masters += 4 * part;
      m.gradients += 4 * part;
      largest = std::max(largest, elements);
      continue;
    }
    // A sharded bf16 model keeps the f32 values of bf16_only weights in shards; everything else has
    // them whole.
    m.weights += working * elements;
    if (bf16) m.masters += 4 * (sharded && b.bf16_only ? part : elements);
    m.gradients += 4 * elements;
  }
  // The slots of sharded buckets (nn/parameters.h).
  const std::size_t slots = std::min(2, table.sharded_buckets());
  m.weights += slots * working * largest;
  m.gradients += slots * 4 * largest;
  for (const auto& p : table.all())
    if (!p->trainable && p->role != Parameter::Role::base)
      fixed += static_cast<std::size_t>(p->shape.numel());
  m.fixed = (bf16 ? 6 : 4) * fixed + table.base_bytes(bf16);
  return m;
}

std::size_t free_memory(MPI_Comm world) {
  const std::size_t free = on_cuda() ? device_runtime().free_bytes() : host_memory().available;
  // Ranks of a host share if they name the same GPU, or none. Visible indices differ between ranks,
  // so names are compared.
  MPI_Comm host;
  MPI_Comm_split_type(world, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &host);
  unsigned long long mine = 0;
  if (on_cuda()) mine = std::hash<std::string>{}(visible_gpus().uuids.at(this_device().index));
  int ranks = 1;
  MPI_Comm_size(host, &ranks);
  std::vector<unsigned long long> all(ranks);
  MPI_Allgather(&mine, 1, MPI_UNSIGNED_LONG_LONG, all.data(), 1, MPI_UNSIGNED_LONG_LONG, host);
  MPI_Comm_free(&host);
  const auto sharing = static_cast<std::size_t>(std::count(all.begin(), all.end(), mine));
  return arena_share(free, 1) / sharing;
}

}  // namespace weft
