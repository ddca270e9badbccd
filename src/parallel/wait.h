// Waiting for MPI without spinning on a core that others need.
#pragma once

#include <mpi.h>

#include <functional>

namespace weft {

// Waits until `done`, asked again and again, says so: asleep in between, at first for 20
// microseconds at a time, later for up to `longest_pause` seconds.
void wait_asleep(const std::function<bool()>& done, double longest_pause);

// The same for a request.
void wait_asleep(MPI_Request request, double longest_pause = 0.002);

}  // namespace weft
