// How much memory a step takes, known before it runs.
#pragma once

#include "data/clip_source.h"
#include "models/stdit3.h"

namespace weft {

// Peak arena bytes of forward and backward of one micro-batch of `batch_size` clips of `bucket`: the step is walked
// through without computing, so the figure is exact for captions of full length.
std::size_t plan_step_memory(const Deck& deck, Stdit3& model, const Bucket& bucket,
                             std::int64_t batch_size);

// The arena's capacity in bytes: memory.arena_gib, or what the host has for each of its ranks.
std::size_t arena_capacity(const MemoryDeck& deck, int ranks_on_host);

}  // namespace weft
