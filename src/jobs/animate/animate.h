// `weft animate`: talking heads from pictures and speech, on every rank's own device.
#pragma once

#include <mpi.h>

#include "config/command.h"
#include "config/deck.h"

namespace weft {

// Collective. Makes the clips of the deck's list that are missing, as NAME.mp4 in animate.output.
// Returns the exit code: 0, 3 if clips failed, 75 if stopped early.
int animate(const Deck& deck, MPI_Comm world);
Command animate_command();

}  // namespace weft
