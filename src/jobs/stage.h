// data.stage for a job: copies on every node (data/stage.h).
#pragma once

#include <mpi.h>

#include "config/deck.h"

namespace weft {

// Collective, before a training opens its data: the first rank of every node copies the stores of
// data.path and validation.path, and from then on all ranks read the copies. Nothing without
// data.stage. Throws on every rank what stage_stores() throws on one. Logs time and rate.
void stage_data(const Deck& deck, MPI_Comm world);

}  // namespace weft
