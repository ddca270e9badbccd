// data.stage for a job: copies on every node (data/stage.h).
#pragma once

#include <mpi.h>

#include "config/deck.h"

namespace weft {

// Collective, before a training opens its data: the first rank of every node copies the stores of
// data.path and validation.path, and from then on all ranks read the copies. Nothing without
// data.stage. Throws on every rank what stage_stores() throws on one, and Exit::hardware where the
// copies of nodes differ. Logs time and rate. False on all ranks once a signal has asked the first
// rank of a node to stop: the job ends with 75, and RUN/stopped_while_staging tells a job script
// that training had not begun.
bool stage_data(const Deck& deck, MPI_Comm world);

}  // namespace weft
