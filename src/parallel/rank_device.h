// Assigns one GPU to each rank.
#pragma once

#include <mpi.h>

#include <cstddef>
#include <string>
#include <vector>

#include "tensor/device.h"

namespace weft {

struct RankDevice {
  int host_rank = 0, host_ranks = 1;  // of this rank among those on its host
  int core_sharers = 1;               // of them, on each core on which this rank may run
  bool shared = false;                // another rank uses the same GPU
};

// Collective. Chooses by the deck keys device.kind ("auto", "cpu", "cuda") and device.share, and
// takes the device. The ranks of a host distribute the GPUs that each can see (respecting
// CUDA_VISIBLE_DEVICES and Slurm's binding; GPUs are identified by UUID) by assign_gpus(); a GPU
// for two ranks is Exit::usage unless `share`. "auto" without a GPU takes the CPU, on all ranks,
// and says why in one line; "cuda" without one is Exit::usage. A WARN where Open MPI's mpirun has
// bound the ranks of the first host to at most half of its cores.
RankDevice choose_device(const std::string& kind, bool share, MPI_Comm world);

// Collective. The ranks that share each core on which this rank may run: 1 where the launcher has
// bound all to cores of their own, the ranks of the host where it has bound none. `used`: the cores
// on which any of them may run.
int count_core_sharers(MPI_Comm host, int& used);

// A rank of a host, the GPUs that it sees, and NUMA nodes; -1: not known.
struct SeenGpu {
  std::string uuid;
  int node = -1;
};
struct HostRank {
  std::vector<SeenGpu> gpus;
  int node = -1;
};
// For each rank the index of its GPU in its own list, which is not empty. First every GPU gets one
// rank at most, then two, and so on. In each of these rounds the pairs of one NUMA node come first,
// then the others, both in order of rank and each rank the first of its GPUs; a pair gives way only
// to a rank that could have no GPU otherwise.
std::vector<std::size_t> assign_gpus(const std::vector<HostRank>& ranks);

}  // namespace weft
