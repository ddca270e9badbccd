// Waiting for MPI without spinning on a core that others need.
#pragma once

#include <mpi.h>

namespace weft {

// Waits for the request asleep, at first for 20 microseconds at a time, later for up to
// `longest_pause` seconds.
void wait_asleep(MPI_Request request, double longest_pause = 0.002);

}  // namespace weft
