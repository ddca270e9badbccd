// Ends the job on all ranks.
#pragma once

#include <mpi.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>

#include "core/error.h"

namespace weft {

// Ends the job with this exit code, and this rank even if MPI cannot end the others. Callable from
// any thread.
[[noreturn]] inline void end_job(MPI_Comm comm, Exit code) {
  // MPI_Abort may wait for a daemon that is gone.
  static int status;
  status = static_cast<int>(code);
  std::signal(SIGALRM, [](int) { _exit(status); });
  alarm(2);
  std::fflush(nullptr);
  MPI_Abort(comm, status);
  _exit(status);
}

}  // namespace weft
