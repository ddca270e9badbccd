// `weft evaluate` of text detectors: precision, recall and Hmean.
#pragma once

#include <mpi.h>

#include "jobs/evaluate/evaluate.h"
#include "parallel/rank_device.h"

namespace weft {

// Collective, as evaluate().
int evaluate_detection(const Deck& deck, const RankDevice& device, const DetectionPage& page,
                       MPI_Comm world);

}  // namespace weft
