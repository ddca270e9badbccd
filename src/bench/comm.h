// `weft bench comm`: all-reduce over all ranks, checked and timed for each size.
#pragma once

#include <mpi.h>

#include <string>

#include "config/command.h"

namespace weft {

struct BenchCommRequest {
  std::string device = "auto";
  bool share = false;
  double largest_mib = 256;
  std::string json;
};

// Collective. Prints time, algorithm and bus bandwidth (2 (n-1)/n of it, as nccl-tests counts) and wrong elements of sums
// whose results are known exactly, and processor time of this rank a byte; with bf16 on the wire, and by MPI_Allreduce on the
// host, in turn. Exit::hardware if any is wrong.
int bench_comm(const BenchCommRequest& request, MPI_Comm world);
Command bench_comm_command();

}  // namespace weft
