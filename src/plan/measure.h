// This host's ranks as a machine: what a model measured of itself (TrainingTask::measure), and the
// collectives between them.
#pragma once

#include <mpi.h>

#include <vector>

#include "plan/step_model.h"

namespace weft {

struct LocalMeasurement {
  Machine machine;  // ranks of this world as one node
  std::vector<MicroBatchCost>
      costs;  // [bucket], a micro-batch of its batch size; means over the ranks
  double optimizer_bandwidth = 0;  // B/s, in units of optimizer_bytes_an_element
  Rates rates;                     // products and bandwidth that these times amount to
};

// Collective: measures the collectives, and adds what the model measured.
LocalMeasurement measure_local(const Deck& deck, MeasuredWork work, MPI_Comm world);

}  // namespace weft
