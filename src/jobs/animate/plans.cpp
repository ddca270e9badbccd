#include "jobs/animate/plans.h"

#include <algorithm>
#include <deque>
#include <limits>
#include <numeric>

#include "core/error.h"
#include "core/log.h"

namespace weft {
namespace {

using Kind = ClipPart::Kind;

const ClipPart& part_of(const std::vector<ClipPart>& parts, std::int64_t item) {
  return parts[static_cast<std::size_t>(item)];
}

// The missing parts of each clip that has any, the costliest clips first.
std::vector<ItemBatch> by_clip(const std::vector<ClipPart>& parts,
                               const std::vector<std::int64_t>& missing,
                               const std::vector<ClipCost>& costs) {
  std::vector<std::int64_t> sorted = missing;
  std::ranges::sort(sorted);  // clip by clip, in the order in which parts are made
  std::vector<ItemBatch> clips;
  std::int64_t last = -1;
  for (const std::int64_t item : sorted) {
    const std::int64_t clip = part_of(parts, item).clip;
    if (clip != last) clips.emplace_back();
    last = clip;
    clips.back().push_back(item);
  }
  const auto cost = [&](const ItemBatch& b) {
    return costs[static_cast<std::size_t>(part_of(parts, b.front()).clip)].total();
  };
  std::ranges::stable_sort(clips, [&](const auto& a, const auto& b) { return cost(a) > cost(b); });
  return clips;
}

// Batches in the order of the queue, with joins that wait for their place in it.
class Queue {
 public:
  explicit Queue(int ranks) : ranks_(ranks) {}
  void add(ItemBatch batch) {
    if (batch.empty()) return;
    batches_.push_back(std::move(batch));
    while (!joins_.empty() && joins_.front().first <= std::ssize(batches_)) put_join();
  }
  void join(std::int64_t item) { joins_.emplace_back(std::ssize(batches_) + ranks_, item); }
  std::vector<ItemBatch> take() {
    while (!joins_.empty()) put_join();
    return std::move(batches_);
  }

 private:
  void put_join() {
    batches_.push_back({joins_.front().second});
    joins_.pop_front();
  }
  int ranks_;
  std::vector<ItemBatch> batches_;
  std::deque<std::pair<std::int64_t, std::int64_t>> joins_;  // place, item
};

}  // namespace

const char* name_of(ClipPlan plan) {
  return plan == ClipPlan::clips ? "clips" : plan == ClipPlan::frames ? "frames" : "apart";
}

std::vector<ItemBatch> lay_out(ClipPlan plan, const std::vector<ClipPart>& parts,
                               const std::vector<std::int64_t>& missing,
                               const std::vector<ClipCost>& costs, int ranks) {
  const std::vector<ItemBatch> clips = by_clip(parts, missing, costs);
  if (plan == ClipPlan::clips) return clips;
  const auto preparation = [&](const ItemBatch& clip) -> ItemBatch {
    if (part_of(parts, clip.front()).kind != Kind::prepare) return {};
    return {clip.front()};
  };
  Queue queue(ranks);
  if (plan == ClipPlan::apart && !clips.empty()) queue.add(preparation(clips.front()));
  for (std::size_t c = 0; c < clips.size(); ++c) {
    ItemBatch with;  // the first piece
    if (plan == ClipPlan::frames) with = preparation(clips[c]);
    if (plan == ClipPlan::apart && c + 1 < clips.size()) queue.add(preparation(clips[c + 1]));
    for (const std::int64_t item : clips[c]) {
      const Kind kind = part_of(parts, item).kind;
      if (kind == Kind::join) {
        queue.add(std::exchange(with, {}));
        queue.join(item);
      } else if (kind == Kind::frames) {
        with.push_back(item);
        queue.add(std::exchange(with, {}));
      }
    }
    queue.add(std::exchange(with, {}));
  }
  return queue.take();
}

double makespan(const std::vector<ItemBatch>& batches, const std::vector<ClipPart>& parts,
                const std::vector<ClipCost>& costs, int ranks) {
  std::vector<double> free(static_cast<std::size_t>(ranks), 0);
  std::vector<double> prepared(costs.size(), 0), rendered(costs.size(), 0);
  for (const ItemBatch& batch : batches) {
    double& now = *std::ranges::min_element(free);
    for (const std::int64_t item : batch) {
      const ClipPart& p = part_of(parts, item);
      const auto c = static_cast<std::size_t>(p.clip);
      if (p.kind == Kind::prepare) {
        prepared[c] = now += costs[c].prepare;
      } else if (p.kind == Kind::frames) {
        now = std::max(now, prepared[c]) + static_cast<double>(p.count) * costs[c].frame;
        rendered[c] = std::max(rendered[c], now);
      } else {
        now = std::max(now, rendered[c]) + costs[c].join;
      }
    }
  }
  return *std::ranges::max_element(free);
}

ChosenPlan choose_plan(const std::string& wish, const std::vector<ClipPart>& parts,
                       const std::vector<std::int64_t>& missing, const std::vector<ClipCost>& costs,
                       int ranks) {
  ChosenPlan chosen;
  double best = std::numeric_limits<double>::infinity();
  for (const ClipPlan plan : all_clip_plans) {
    std::vector<ItemBatch> batches = lay_out(plan, parts, missing, costs, ranks);
    const double time = makespan(batches, parts, costs, ranks);
    chosen.makespans.push_back(time);
    const bool take = wish == "auto" ? time < 0.99 * best : wish == name_of(plan);
    if (!take) continue;
    best = time;
    chosen.plan = plan;
    chosen.batches = std::move(batches);
  }
  const double work =
      std::accumulate(missing.begin(), missing.end(), 0.0, [&](double sum, std::int64_t item) {
        const ClipPart& p = part_of(parts, item);
        const ClipCost& c = costs[static_cast<std::size_t>(p.clip)];
        return sum + (p.kind == Kind::prepare  ? c.prepare
                      : p.kind == Kind::frames ? static_cast<double>(p.count) * c.frame
                                               : c.join);
      });
  std::string others;
  for (const ClipPlan plan : all_clip_plans)
    others += fmt::format(
        "{}{} {:.3g}", others.empty() ? "" : ", ", name_of(plan),
        work > 0 ? ranks * chosen.makespans[static_cast<std::size_t>(plan)] / work : 1.0);
  chosen.why = fmt::format("{}{}, on {}; time beside work shared evenly: {}", name_of(chosen.plan),
                           wish == "auto" ? ", the quickest by estimate" : "",
                           counted(ranks, "rank"), others);
  return chosen;
}

}  // namespace weft
