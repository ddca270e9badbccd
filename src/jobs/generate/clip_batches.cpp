#include "jobs/generate/clip_batches.h"

#include <algorithm>

#include "jobs/generate/options.h"

namespace weft {
namespace {

const ClipItem& item_of(const GenerateJob& job, std::int64_t number) {
  return job.items[static_cast<std::size_t>(number)];
}

// Clips of a batch start from noise only and have one loop.
bool may_share(const Deck& deck, const GenerateJob& job, const ClipItem& item) {
  return deck.get<GenerateDeck>().loop == 1 && item.masks.empty() &&
         job.prompts[static_cast<std::size_t>(item.prompt)].references.empty();
}

}  // namespace

BatchLimits limit_batches(const Deck& deck, const GenerateJob& job,
                          const std::vector<std::int64_t>& order, int groups) {
  std::map<PixelSize, std::int64_t> clips;
  for (const std::int64_t number : order)
    clips[item_of(job, number).pixels] += may_share(deck, job, item_of(job, number)) ? 1 : 0;
  BatchLimits limits;
  for (const auto& [size, count] : clips)
    limits[size] = std::clamp<std::int64_t>((count + groups - 1) / groups, 1,
                                            deck.get<GenerateDeck>().batch_size);
  return limits;
}

std::vector<ClipBatch> make_batches(const Deck& deck, const GenerateJob& job,
                                    const std::vector<std::int64_t>& order,
                                    const BatchLimits& limits) {
  std::vector<ClipBatch> batches;
  std::map<PixelSize, std::size_t> open;  // the batch that clips of a size go into
  for (const std::int64_t number : order) {
    const ClipItem& item = item_of(job, number);
    const bool shares = may_share(deck, job, item);
    const auto found = open.find(item.pixels);
    if (shares && found != open.end() &&
        std::ssize(batches[found->second]) < limits.at(item.pixels)) {
      batches[found->second].push_back(number);
      continue;
    }
    if (shares) open[item.pixels] = batches.size();
    batches.push_back({number});
  }
  const auto cost = [&](const ClipBatch& batch) {
    return item_of(job, batch.front()).cost * static_cast<double>(batch.size());
  };
  if (deck.get<GenerateDeck>().share_out)
    std::stable_sort(batches.begin(), batches.end(),
                     [&](const ClipBatch& a, const ClipBatch& b) { return cost(a) > cost(b); });
  return batches;
}

}  // namespace weft
