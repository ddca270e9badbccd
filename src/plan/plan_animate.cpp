// `weft plan --job animate`. A file of its own: jobs/animate has a ClipSize, and so has the
// sampler.
#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <numeric>

#include "core/error.h"
#include "core/host.h"
#include "core/log.h"
#include "jobs/animate/networks.h"
#include "plan/plan.h"

namespace weft {
namespace {

// The deck with networks of the same shapes that no file is read for.
Deck with_drawn_weights(const Deck& deck) {
  Deck drawn = deck;
  AnimateDeck& a = drawn.get<AnimateDeck>();
  for (std::string* weights :
       {&a.weights, &a.mapping_weights, &a.mapping_full_weights, &a.detector_weights,
        &a.landmark_weights, &a.gfpgan_weights, &a.parsenet_weights})
    *weights = "random:1";
  return drawn;
}

}  // namespace

void plan_animate(const Deck& deck, const PlanRequest& request, int ranks,
                  nlohmann::ordered_json& j) {
  const Deck drawn = with_drawn_weights(deck);
  const std::vector<ClipRequest> clips = list_clips(deck, MPI_COMM_SELF);
  const auto sizes = measure_clips(clips, deck.media, MPI_COMM_SELF);
  AnimateNetworks networks(drawn, clips, MPI_COMM_SELF);
  std::vector<const ClipRequest*> all;
  for (const ClipRequest& c : clips) all.push_back(&c);
  const std::size_t before = resident_bytes();
  networks.load(all, all);
  const std::size_t weights = std::max(resident_bytes(), before) - before;

  const std::size_t capacity = arena_share(static_cast<std::size_t>(request.memory_gb * 1e9), 1);
  std::size_t most = 0;
  std::int64_t frames = 0;
  std::vector<ClipCost> costs;
  for (std::size_t i = 0; i < clips.size(); ++i) {
    frames += sizes[i].frames;
    if (sizes[i].frames == 0) {
      costs.emplace_back();
      fmt::print("  {} cannot be made: its picture or its speech cannot be read\n", clips[i].name);
      continue;
    }
    costs.push_back(networks.cost(clips[i], sizes[i]));
    const std::size_t needed = networks.plan(clips[i], sizes[i], true).bytes;
    WEFT_CHECK(needed + weights <= capacity, Exit::usage,
               "give ranks more memory, lower sadtalker.batch_size, or make its picture smaller",
               "{} needs {:.2f} GB in addition to {:.2f} GB of weights; a rank has {:.2f}",
               clips[i].name, gb(static_cast<double>(needed)), gb(static_cast<double>(weights)),
               gb(static_cast<double>(capacity)));
    most = std::max(most, needed);
  }
  const Rates rates = rates_of(request, true);
  const double rate = rates.convolutions > 0 ? rates.convolutions : rates.products;
  fmt::print("\n{} of {}, every rank\n", counted(std::ssize(clips), "clip"),
             counted(frames, "frame"));
  fmt::print("  {:<20} {:>9.3f} GB  networks in f32 as a CPU holds them\n", "weights",
             gb(static_cast<double>(weights)));
  fmt::print("  {:<20} {:>9.3f} GB  largest clip, whatever its length\n", "activations",
             gb(static_cast<double>(most)));
  j["memory"] = {{"weights", weights}, {"activations", most}};
  j["frames"] = frames;

  // Clips, or pieces of them, go to whoever is free; a clip that all ranks share is prepared on
  // each.
  const std::vector<ClipPart> parts = parts_of(sizes, clips);
  std::vector<std::int64_t> items(parts.size());
  std::iota(items.begin(), items.end(), 0);
  double work = 0, repeated = 0;
  for (const ClipCost& c : costs) work += c.total();
  for (const ItemBatch& join : share_parts(parts, items, {}, costs, ranks).joins)
    repeated += (ranks - 1) * costs[parts[join[0]].clip].prepare;
  const double seconds = (work + repeated) / ranks / rate;
  fmt::print("  {:<20} {:>8.1f} s {:>12.1f} frames/s, efficiency {:.1f} %\n", "time", seconds,
             static_cast<double>(frames) / std::max(seconds, 1e-9),
             100 * work / std::max(work + repeated, 1e-9));
  fmt::print("  networks alone, at {:.3g} TFLOP/s ({})\n", rate * 1e-12, rates.origin);
  j["seconds"] = seconds;
  j["operations"] = work;
}

}  // namespace weft
