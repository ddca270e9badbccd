// Which clips are sampled together (generate.batch_size): a rank, or a group of ranks, takes one
// batch at a time from rank 0.
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

// The most clips of a size in one batch.
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
