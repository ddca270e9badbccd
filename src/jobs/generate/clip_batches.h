// Which clips are sampled together (generate.batch_size): a batch is what a rank, or a group of
// ranks, takes from the queue.
#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include "config/deck.h"
#include "jobs/generate/job.h"
#include "jobs/generate/prompts/sizes.h"

namespace weft {

// Places in GenerateJob::items: clips of one size and length, which make one tensor, without
// references, masks or loops; or any one clip.
using ClipBatch = std::vector<std::int64_t>;

// Clips of a size that go together at most.
using BatchLimits = std::map<PixelSize, std::int64_t>;

// For all sizes among the items `order`: generate.batch_size, but no more than each of `groups` has
// on average, rounded up.
BatchLimits limit_batches(const Deck& deck, const GenerateJob& job,
                          const std::vector<std::int64_t>& order, int groups);

// Every item of `order` in one batch. They come as their first items do in `order`; with
// generate.share_out the costliest first.
std::vector<ClipBatch> make_batches(const Deck& deck, const GenerateJob& job,
                                    const std::vector<std::int64_t>& order,
                                    const BatchLimits& limits);

}  // namespace weft
