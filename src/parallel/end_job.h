// Ends the job on all ranks.
#pragma once

#include <mpi.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>

#include "core/error.h"

namespace weft {

// With this exit code; this rank ends also where MPI cannot end the others. From any thread.
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
