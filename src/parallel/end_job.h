#pragma once

#include <mpi.h>

#include "core/error.h"

namespace weft {

// Ends all ranks with this exit code; this one also where MPI cannot. From any thread.
[[noreturn]] void end_job(MPI_Comm comm, Exit code);

}  // namespace weft
