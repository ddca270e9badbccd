// The training job: from a deck to a trained model, through stops and restarts.
#pragma once

#include <mpi.h>

#include "core/deck.h"

namespace weft {

// Collective. Trains until deck.train.steps, going on from RUN/latest if there is one (unless run.resume is
// false). Returns 0 when done, 75 when it was asked to stop and has saved. Throws Error.
int train(const Deck& deck, MPI_Comm world);

}  // namespace weft
