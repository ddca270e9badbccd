// Assigns devices: one rank, one GPU.
#pragma once

#include <mpi.h>

#include <string>

#include "tensor/device.h"

namespace weft {

struct RankDevice {
  int host_rank = 0, host_ranks = 1;  // of this rank among those on its host
  bool shared = false;                // another rank uses the same GPU
};

// Collective. Chooses by the deck keys device.kind ("auto", "cpu", "cuda") and device.share, and
// takes the device. The ranks of a host distribute the GPUs that each can see (respecting
// CUDA_VISIBLE_DEVICES and Slurm's binding; GPUs are identified by UUID) in order of rank, each to
// the least used; a GPU for two ranks is Exit::usage unless `share`. "auto" without a GPU takes the
// CPU, on all ranks, and says why in one line; "cuda" without one is Exit::usage.
RankDevice choose_device(const std::string& kind, bool share, MPI_Comm world);

}  // namespace weft
