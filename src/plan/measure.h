// What this host's ranks do with a deck's micro-batches, measured on a piece of the model: one and two pairs of blocks of the
// deck's width at the shapes of its buckets. The whole model is not run.
#pragma once

#include <mpi.h>

#include <span>
#include <vector>

#include "data/clip_source.h"
#include "plan/step_model.h"
#include "train/memory_plan.h"

namespace weft {

struct LocalMeasurement {
  Machine machine;  // ranks of this world as one node
  std::vector<MicroBatchCost>
      costs;  // [bucket], a micro-batch of its batch size; means over the ranks
  double optimizer_bandwidth = 0;  // B/s, in units of optimizer_bytes_an_element
  Rates rates;                     // products and bandwidth that these times amount to
};

// Collective over all ranks of `world`, which compute at once, as they would in a step. Devices are chosen and threads are
// set already. Times are medians of several runs; long buckets are measured with fewer clips.
LocalMeasurement measure_local(const Deck& deck, std::span<const Bucket> buckets,
                               std::span<const std::int64_t> batch_sizes,
                               std::span<const StepMemory> memory, MPI_Comm world);

}  // namespace weft
