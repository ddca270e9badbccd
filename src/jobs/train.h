// `weft train DECK`.
#pragma once

#include <mpi.h>

#include "config/command.h"

namespace weft {

// Collective. Trains until train.steps, going on from RUN/latest if there is one (unless run.resume
// is false). Returns 0 when done, 75 when it was asked to stop and has saved. Throws Error.
int train(const Deck& deck, MPI_Comm world);
Command train_command();

}  // namespace weft
