// Times of a model's micro-batches on this host's ranks. Collective over all ranks of a world,
// which compute at once, as they would in a step. Choose devices and set threads before.
#pragma once

#include <mpi.h>

#include <vector>

#include "train/task.h"

namespace weft {

inline constexpr int measured_runs = 5;  // after one warm-up run

double mean_over_ranks(double value, MPI_Comm world);
double now_done();  // the time in seconds, once the device is idle

// Seconds.
struct MeasuredTimes {
  double forward = 0, backward = 0;
};

// One micro-batch as the trainer runs it, from the clips' bytes to gradients: medians of several
// runs, means over the ranks. The task's parameters are allocated (allocate_for_measuring).
MeasuredTimes time_micro_batch(TrainingTask& task, const Bucket& bucket, std::int64_t clips,
                               MPI_Comm world);
// The update of all parameters: seconds an element.
double time_update(const TrainDeck& how, ParameterTable& params, MPI_Comm world);
// Draws the weights and allocates the gradients, in buckets as `deck` wants them.
void allocate_for_measuring(TrainingTask& task, const Deck& deck);

}  // namespace weft
