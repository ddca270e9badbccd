// Ends the job on all ranks.
#pragma once

#include <mpi.h>
#include <unistd.h>

#include <cstdio>

#include "core/error.h"
#include "core/faults/crash.h"

namespace weft {

// Ends the job with this exit code, and this rank even if MPI cannot end the others. Callable from
// any thread.
[[noreturn]] inline void end_job(MPI_Comm comm, Exit code) {
  crash::end_within(2, code);  // MPI_Abort may wait for a daemon that is gone
  std::fflush(nullptr);
  MPI_Abort(comm, static_cast<int>(code));
  _exit(static_cast<int>(code));
}

}  // namespace weft
