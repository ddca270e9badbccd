// `weft evaluate` of segmentation models: IoU of classes, accuracy of pixels.
#pragma once

#include <mpi.h>

#include "jobs/evaluate/evaluate.h"
#include "parallel/rank_device.h"

namespace weft {

// Collective, as evaluate().
int evaluate_segmentation(const Deck& deck, const RankDevice& device, const SegmentationPage& page,
                          MPI_Comm world);

}  // namespace weft
