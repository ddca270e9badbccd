// One NCCL communicator from the inside.
#pragma once

#include <mpi.h>

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "nccl.h"

namespace emulation {

struct Collective {
  enum class Kind { all_reduce, reduce, reduce_scatter, all_gather, broadcast, send, receive } kind;
  const void* from;
  void* to;
  std::size_t count;  // as the call gives it
  ncclDataType_t type;
  ncclRedOp_t operation = ncclSum;
  int peer = 0;  // root, or the other rank of a send or receive
};

struct Range {
  const char* begin = nullptr;
  std::size_t bytes = 0;
};

// Shared by the handle and the work that is queued, which may outlive it.
struct NcclState {
  MPI_Comm comm = MPI_COMM_NULL;
  MPI_Comm control = MPI_COMM_NULL;  // for what the host does meanwhile
  int rank = 0, size = 1;
  // Of all communicators that share resources.
  std::shared_ptr<std::atomic<bool>> aborted = std::make_shared<std::atomic<bool>>(false);
  bool shares = false;       // its resources with what is split off it
  bool own = true;           // has resources of its own, not those of what it was split off
  bool has_buffers = false;  // nccl_buffer_bytes are charged
  unsigned draw = 0;         // the same on every rank, another in every run
  std::map<void*, Range> registered;  // by handle
  // Operations run one after another in the order in which the host asked for them, as on every
  // other rank.
  std::uint64_t issued = 0, finished = 0;
};

// Queues the operations, to run together.
ncclResult_t issue(std::shared_ptr<NcclState> state, std::vector<Collective> group, cudaStream_t);

std::size_t bytes_of(ncclDataType_t type);

}  // namespace emulation

struct ncclComm {
  std::shared_ptr<emulation::NcclState> state;
};
