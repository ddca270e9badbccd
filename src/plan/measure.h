// What this host's ranks do with a deck's micro-batches, measured on a piece of the model (plan/planned_*.cpp) at the shapes
// of the deck's buckets. The whole model is not run.
#pragma once

#include <mpi.h>

#include <string>
#include <vector>

#include "data/clip_source.h"
#include "plan/step_model.h"
#include "train/task.h"

namespace weft {

// Seconds.
struct MeasuredTimes {
  double forward = 0, backward = 0;
};

// Collective over all ranks of `world`, which compute at once, as they would in a step. Devices are chosen and threads are
// set already. One micro-batch as the trainer runs it, from the clips' bytes to gradients: medians of several runs, means
// over the ranks. The task's parameters are allocated (allocate_for_measuring).
MeasuredTimes time_micro_batch(TrainingTask& task, const Bucket& bucket, std::int64_t clips,
                               MPI_Comm world);
// Weights drawn and room for gradients, in buckets as `deck` wants them.
void allocate_for_measuring(TrainingTask& task, const Deck& deck);

struct LocalMeasurement {
  Machine machine;  // ranks of this world as one node
  std::vector<MicroBatchCost>
      costs;  // [bucket], a micro-batch of its batch size; means over the ranks
  double optimizer_bandwidth = 0;  // B/s, in units of optimizer_bytes_an_element
  Rates rates;                     // products and bandwidth that these times amount to
};

// Collective. What is the same for every model: the update of `params` and the collectives. `costs` were measured by `how`.
LocalMeasurement measure_local(const Deck& deck, ParameterTable& params,
                               std::vector<MicroBatchCost> costs, const std::string& how,
                               MPI_Comm world);

}  // namespace weft
