// The segmentation models' probes: forward, loss, train_steps, sync_batch_norm and
// segmentation_scores (docs/probe.md).
#pragma once

#include "jobs/probe/probe.h"

namespace weft {

// Collective: train_steps and sync_batch_norm take inputs for each rank.
int probe_segmentation(const Deck& deck, const ProbeRequest& request, MPI_Comm world);

// Keys of [model] and [train] that probes alone read.
std::vector<DeckTable> probe_tables();

}  // namespace weft
