// NCCL's calls over MPI: how communicators come to be, and groups. The ranks of an id find each
// other by messages over MPI_COMM_WORLD, so that some of them may make a communicator while others
// are elsewhere.
#include "nccl.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <utility>

#include "collectives.h"
#include "memory.h"
#include "streams.h"

using emulation::Collective;
using emulation::NcclState;

namespace {

constexpr int tag_base = 20000;  // below every MPI's limit of 32767

struct Id {
  int leader, number;  // the rank of the world that made it, and its how manieth it is
};

thread_local int group_depth = 0;
struct Grouped {
  ncclComm_t comm;
  cudaStream_t stream;
  Collective collective;
};
thread_local std::vector<Grouped> grouped;

// Nonblocking MPI with pauses: the processor is left to the ranks that work.
void finish(MPI_Request& request) {
  for (int done = 0; !done;) {
    MPI_Test(&request, &done, MPI_STATUS_IGNORE);
    if (!done) std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
}

// The world's ranks of a communicator in its order: each tells the leader who it is, the leader
// tells all.
std::vector<int> gather_members(const Id& id, int size, int rank) {
  int world_rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &world_rank);
  const int tag = tag_base + id.number % 4000 * 2;
  std::vector<int> members(size, -1);
  MPI_Request request;
  if (world_rank != id.leader) {
    const int mine[2] = {rank, world_rank};
    MPI_Isend(mine, 2, MPI_INT, id.leader, tag, MPI_COMM_WORLD, &request);
    finish(request);
    MPI_Irecv(members.data(), size, MPI_INT, id.leader, tag + 1, MPI_COMM_WORLD, &request);
    finish(request);
    return members;
  }
  members[rank] = world_rank;
  for (int i = 1; i < size; ++i) {
    int other[2];
    MPI_Irecv(other, 2, MPI_INT, MPI_ANY_SOURCE, tag, MPI_COMM_WORLD, &request);
    finish(request);
    if (other[0] < 0 || other[0] >= size || members[other[0]] != -1)
      emulation::die("two ranks of an NCCL communicator call themselves %d of %d", other[0], size);
    members[other[0]] = other[1];
  }
  for (const int m : members) {
    if (m == world_rank) continue;
    MPI_Isend(members.data(), size, MPI_INT, m, tag + 1, MPI_COMM_WORLD, &request);
    finish(request);
  }
  return members;
}

std::string last_error;

// NCCL takes one rank for each GPU. It knows a GPU by its PCI address, in which the slices of one
// (MIG) do not differ, and a host by its name, or by NCCL_HOSTID where that is set. Whether each of
// the communicator's ranks has its own; all of them ask.
bool own_gpus(const NcclState& s) {
  char bus[16] = "", host[64] = "";
  int device = 0;
  cudaGetDevice(&device);
  cudaDeviceGetPCIBusId(bus, sizeof bus, device);
  gethostname(host, sizeof host - 1);
  const char* id = std::getenv("NCCL_HOSTID");
  const std::size_t mine = std::hash<std::string>{}(std::string(id ? id : host) + " " + bus);
  std::vector<std::size_t> all(s.size);
  MPI_Request request;
  MPI_Iallgather(&mine, sizeof mine, MPI_BYTE, all.data(), sizeof mine, MPI_BYTE, s.comm, &request);
  finish(request);
  for (int r = 0; r < s.size; ++r)
    if (r != s.rank && all[r] == mine) {
      char text[96];
      std::snprintf(text, sizeof text,
                    "Duplicate GPU detected : rank %d and rank %d both on CUDA device %s", s.rank,
                    r, bus);
      last_error = text;
    }
  std::sort(all.begin(), all.end());
  return std::adjacent_find(all.begin(), all.end()) == all.end();
}

ncclResult_t add(ncclComm_t comm, cudaStream_t stream, const Collective& c,
                 const char* call = __builtin_FUNCTION()) {
  if (comm == nullptr) return ncclInvalidArgument;
  if (emulation::call_fails(call)) return ncclUnhandledCudaError;
  if (group_depth == 0) return emulation::issue(comm->state, {c}, stream);
  grouped.push_back({comm, stream, c});
  return ncclSuccess;
}

}  // namespace

ncclResult_t ncclGetVersion(int* v) { return *v = NCCL_VERSION_CODE, ncclSuccess; }

ncclResult_t ncclGetUniqueId(ncclUniqueId* out) {
  static int made = 0;
  Id id{0, made++};
  MPI_Comm_rank(MPI_COMM_WORLD, &id.leader);
  *out = {};
  std::memcpy(out->internal, &id, sizeof id);
  return ncclSuccess;
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int size, ncclUniqueId unique, int rank,
                                    ncclConfig_t*) {
  if (size < 1 || rank < 0 || rank >= size) return ncclInvalidArgument;
  if (emulation::call_fails(__func__)) return ncclUnhandledCudaError;
  Id id{};
  std::memcpy(&id, unique.internal, sizeof id);
  const std::vector<int> members = gather_members(id, size, rank);
  MPI_Group world, group;
  MPI_Comm_group(MPI_COMM_WORLD, &world);
  MPI_Group_incl(world, size, members.data(), &group);
  const auto state = std::make_shared<NcclState>();
  state->rank = rank;
  state->size = size;
  MPI_Comm_create_group(MPI_COMM_WORLD, group, tag_base + id.number % 4000 * 2, &state->comm);
  MPI_Group_free(&group);
  MPI_Group_free(&world);
  if (!own_gpus(*state)) {
    MPI_Comm_free(&state->comm);
    return ncclInvalidUsage;
  }
  *comm = new ncclComm{state};
  const emulation::Device device;
  return emulation::charge(emulation::nccl_bytes) ? ncclSuccess : ncclUnhandledCudaError;
}
ncclResult_t ncclCommInitRank(ncclComm_t* comm, int size, ncclUniqueId id, int rank) {
  return ncclCommInitRankConfig(comm, size, id, rank, nullptr);
}

ncclResult_t ncclCommFinalize(ncclComm_t) { return ncclSuccess; }
ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  if (comm == nullptr) return ncclSuccess;
  const emulation::Device device;
  const auto state = comm->state;
  // What is queued ends first, as NCCL's destruction waits for it.
  emulation::run_until([&] { return state->aborted || state->finished == state->issued; });
  int finalized = 0;
  MPI_Finalized(&finalized);
  if (!finalized && !state->aborted && !emulation::gpu_is_lost()) MPI_Comm_free(&state->comm);
  emulation::give_back(emulation::nccl_bytes);
  delete comm;
  return ncclSuccess;
}
ncclResult_t ncclCommAbort(ncclComm_t comm) {
  if (comm == nullptr) return ncclSuccess;
  if (const char* abort = std::getenv("WEFT_EMULATION_NCCL_ABORT");
      abort != nullptr && std::strcmp(abort, "blocks") == 0)
    std::this_thread::sleep_for(std::chrono::hours(1));
  const emulation::Device device;
  // Requests under way are left to MPI: a collective cannot be taken back. The handle stays, for
  // other threads have it.
  comm->state->aborted = true;
  return ncclSuccess;
}
ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* error) {
  if (comm == nullptr) return ncclInvalidArgument;
  static const char* const fail = std::getenv("WEFT_EMULATION_NCCL_FAIL");
  *error = fail != nullptr && comm->state->issued >= std::strtoull(fail, nullptr, 10)
               ? ncclRemoteError
               : ncclSuccess;
  return ncclSuccess;
}
ncclResult_t ncclCommCount(ncclComm_t comm, int* n) { return *n = comm->state->size, ncclSuccess; }
ncclResult_t ncclCommUserRank(ncclComm_t comm, int* r) {
  return *r = comm->state->rank, ncclSuccess;
}
ncclResult_t ncclCommCuDevice(ncclComm_t, int* d) {
  return cudaGetDevice(d) == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError;
}

const char* ncclGetErrorString(ncclResult_t r) {
  switch (r) {
    case ncclSuccess:
      return "no error";
    case ncclUnhandledCudaError:
      return "an error of CUDA";
    case ncclSystemError:
      return "an error of the system";
    case ncclInternalError:
      return "an internal error";
    case ncclInvalidArgument:
      return "an invalid argument";
    case ncclInvalidUsage:
      return "invalid usage";
    case ncclRemoteError:
      return "another rank failed or went away";
    case ncclInProgress:
      return "in progress";
  }
  return "an unknown result";
}
const char* ncclGetLastError(ncclComm_t) { return last_error.c_str(); }

using Kind = Collective::Kind;

ncclResult_t ncclAllReduce(const void* from, void* to, std::size_t n, ncclDataType_t type,
                           ncclRedOp_t operation, ncclComm_t comm, cudaStream_t stream) {
  return add(comm, stream, {Kind::all_reduce, from, to, n, type, operation});
}
ncclResult_t ncclReduce(const void* from, void* to, std::size_t n, ncclDataType_t type,
                        ncclRedOp_t operation, int root, ncclComm_t comm, cudaStream_t stream) {
  return add(comm, stream, {Kind::reduce, from, to, n, type, operation, root});
}
ncclResult_t ncclReduceScatter(const void* from, void* to, std::size_t n, ncclDataType_t type,
                               ncclRedOp_t operation, ncclComm_t comm, cudaStream_t stream) {
  return add(comm, stream, {Kind::reduce_scatter, from, to, n, type, operation});
}
ncclResult_t ncclAllGather(const void* from, void* to, std::size_t n, ncclDataType_t type,
                           ncclComm_t comm, cudaStream_t stream) {
  return add(comm, stream, {Kind::all_gather, from, to, n, type});
}
ncclResult_t ncclBroadcast(const void* from, void* to, std::size_t n, ncclDataType_t type, int root,
                           ncclComm_t comm, cudaStream_t stream) {
  return add(comm, stream, {Kind::broadcast, from, to, n, type, ncclSum, root});
}
ncclResult_t ncclSend(const void* from, std::size_t n, ncclDataType_t type, int to_rank,
                      ncclComm_t comm, cudaStream_t stream) {
  return add(comm, stream, {Kind::send, from, nullptr, n, type, ncclSum, to_rank});
}
ncclResult_t ncclRecv(void* to, std::size_t n, ncclDataType_t type, int from_rank, ncclComm_t comm,
                      cudaStream_t stream) {
  return add(comm, stream, {Kind::receive, nullptr, to, n, type, ncclSum, from_rank});
}

ncclResult_t ncclGroupStart() {
  ++group_depth;
  return ncclSuccess;
}
ncclResult_t ncclGroupEnd() {
  if (group_depth == 0) return ncclInvalidUsage;
  if (--group_depth > 0) return ncclSuccess;
  // All of one communicator and stream run together: sends and receives of a group cannot wait for
  // each other.
  std::vector<Grouped> rest = std::exchange(grouped, {});
  while (!rest.empty()) {
    const ncclComm_t comm = rest.front().comm;
    const cudaStream_t stream = rest.front().stream;
    std::vector<Collective> together;
    std::erase_if(rest, [&](const Grouped& g) {
      if (g.comm != comm || g.stream != stream) return false;
      together.push_back(g.collective);
      return true;
    });
    const ncclResult_t result = emulation::issue(comm->state, std::move(together), stream);
    if (result != ncclSuccess) return result;
  }
  return ncclSuccess;
}
