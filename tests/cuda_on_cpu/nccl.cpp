// NCCL's calls over MPI: how communicators come to be, and groups. The ranks of an id find each
// other by messages over MPI_COMM_WORLD, so that some of them may make a communicator while others
// are elsewhere.
#include "nccl.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "collectives.h"
#include "memory.h"
#include "streams.h"

using emulation::Collective;
using emulation::NcclState;

namespace {

constexpr int tag_base = 20000;  // below every MPI's limit of 32767

struct Id {
  int leader, number;  // the rank of the world that made it, and its how manieth it is
  unsigned draw;
};

thread_local int group_depth = 0;
struct Grouped {
  ncclComm_t comm;
  cudaStream_t stream;
  Collective collective;
};
thread_local std::vector<Grouped> grouped;

// Threads that wait in finish() leave MPI before it ends, whoever has abandoned them.
std::atomic<bool> mpi_ends = false;
std::atomic<int> in_mpi = 0;
int let_threads_leave(MPI_Comm, int, void*, void*) {
  mpi_ends = true;
  while (in_mpi > 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  return MPI_SUCCESS;
}

// Nonblocking MPI with pauses: the processor is left to the ranks that work. False where that was
// given up.
bool finish(MPI_Request& request, const std::atomic<bool>* aborted = nullptr) {
  static std::once_flag once;
  std::call_once(once, [] {
    // MPI_Finalize begins with the attributes of this communicator.
    int key = MPI_KEYVAL_INVALID;
    MPI_Comm_create_keyval(MPI_COMM_NULL_COPY_FN, let_threads_leave, &key, nullptr);
    MPI_Comm_set_attr(MPI_COMM_SELF, key, nullptr);
  });
  ++in_mpi;
  int done = 0;
  while (!done && !mpi_ends && !(aborted != nullptr && *aborted)) {
    MPI_Test(&request, &done, MPI_STATUS_IGNORE);
    if (!done) std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
  --in_mpi;
  return done;
}

// The memory that ncclMemAlloc has given out, and what any communicator has registered.
std::mutex memory_mutex;
std::map<const char*, std::size_t> allocated;
std::vector<emulation::Range> registered;

bool overlap(const emulation::Range& a, const emulation::Range& b) {
  return a.begin < b.begin + b.bytes && b.begin < a.begin + a.bytes;
}

bool valid(const ncclConfig_t* c) {
  const auto flag = [](int v) { return v == NCCL_CONFIG_UNDEF_INT || v == 0 || v == 1; };
  const auto ctas = [](int v) { return v == NCCL_CONFIG_UNDEF_INT || (v >= 1 && v <= 64); };
  return c == nullptr ||
         (flag(c->blocking) && flag(c->splitShare) && ctas(c->minCTAs) && ctas(c->maxCTAs));
}

// Memory that the communicator takes for itself, where it does not share another's.
ncclResult_t charge(const NcclState& state) {
  const emulation::Device device;
  return !state.own || emulation::charge(emulation::nccl_bytes) ? ncclSuccess
                                                                : ncclUnhandledCudaError;
}

// The world's ranks of a communicator in its order: each tells the leader who it is, the leader
// tells all. Empty where that was given up.
std::vector<int> gather_members(const Id& id, int size, int rank) {
  int world_rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &world_rank);
  const int tag = tag_base + id.number % 4000 * 2;
  std::vector<int> members(size, -1);
  MPI_Request request;
  if (world_rank != id.leader) {
    const int mine[2] = {rank, world_rank};
    MPI_Isend(mine, 2, MPI_INT, id.leader, tag, MPI_COMM_WORLD, &request);
    if (!finish(request)) return {};
    MPI_Irecv(members.data(), size, MPI_INT, id.leader, tag + 1, MPI_COMM_WORLD, &request);
    if (!finish(request)) return {};
    return members;
  }
  members[rank] = world_rank;
  for (int i = 1; i < size; ++i) {
    int other[2];
    MPI_Irecv(other, 2, MPI_INT, MPI_ANY_SOURCE, tag, MPI_COMM_WORLD, &request);
    if (!finish(request)) return {};
    if (other[0] < 0 || other[0] >= size || members[other[0]] != -1)
      emulation::die("two ranks of an NCCL communicator call themselves %d of %d", other[0], size);
    members[other[0]] = other[1];
  }
  for (const int m : members) {
    if (m == world_rank) continue;
    MPI_Isend(members.data(), size, MPI_INT, m, tag + 1, MPI_COMM_WORLD, &request);
    if (!finish(request)) return {};
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
  Id id{0, made++, std::random_device()()};
  MPI_Comm_rank(MPI_COMM_WORLD, &id.leader);
  *out = {};
  std::memcpy(out->internal, &id, sizeof id);
  return ncclSuccess;
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int size, ncclUniqueId unique, int rank,
                                    ncclConfig_t* config) {
  if (size < 1 || rank < 0 || rank >= size || !valid(config)) return ncclInvalidArgument;
  if (emulation::call_fails(__func__)) return ncclUnhandledCudaError;
  Id id{};
  std::memcpy(&id, unique.internal, sizeof id);
  const std::vector<int> members = gather_members(id, size, rank);
  if (members.empty()) return ncclInternalError;
  MPI_Group world, group;
  MPI_Comm_group(MPI_COMM_WORLD, &world);
  MPI_Group_incl(world, size, members.data(), &group);
  const auto state = std::make_shared<NcclState>();
  state->rank = rank;
  state->size = size;
  state->draw = id.draw;
  MPI_Comm_create_group(MPI_COMM_WORLD, group, tag_base + id.number % 4000 * 2, &state->comm);
  MPI_Group_free(&group);
  MPI_Group_free(&world);
  if (!own_gpus(*state)) {
    MPI_Comm_free(&state->comm);
    return ncclInvalidUsage;
  }
  MPI_Comm_dup(state->comm, &state->control);
  state->shares = config != nullptr && config->splitShare == 1;
  *comm = new ncclComm{state};
  return charge(*state);
}
// As blocking NCCL: returns once every rank has come, or the communicator is aborted.
ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t* made,
                           ncclConfig_t* config) {
  if (comm == nullptr || color < NCCL_SPLIT_NOCOLOR || !valid(config)) return ncclInvalidArgument;
  if (emulation::call_fails(__func__)) return ncclUnhandledCudaError;
  const std::shared_ptr<NcclState> from = comm->state;
  const int mine[2] = {color, key};
  std::vector<int> all(2 * static_cast<std::size_t>(from->size));
  MPI_Request request;
  MPI_Iallgather(mine, 2, MPI_INT, all.data(), 2, MPI_INT, from->control, &request);
  if (!finish(request, from->aborted.get())) return ncclInternalError;
  *made = nullptr;
  if (color == NCCL_SPLIT_NOCOLOR) return ncclSuccess;
  std::vector<int> members;
  for (int r = 0; r < from->size; ++r)
    if (all[2 * r] == color) members.push_back(r);
  std::stable_sort(members.begin(), members.end(),
                   [&](int a, int b) { return all[2 * a + 1] < all[2 * b + 1]; });
  MPI_Group whole, group;
  MPI_Comm_group(from->control, &whole);
  MPI_Group_incl(whole, static_cast<int>(members.size()), members.data(), &group);
  const auto state = std::make_shared<NcclState>();
  MPI_Comm_create_group(from->control, group, tag_base, &state->comm);
  MPI_Group_free(&group);
  MPI_Group_free(&whole);
  MPI_Comm_dup(state->comm, &state->control);
  MPI_Comm_rank(state->comm, &state->rank);
  MPI_Comm_size(state->comm, &state->size);
  state->own = !from->shares;
  state->shares = config != nullptr && config->splitShare != NCCL_CONFIG_UNDEF_INT
                      ? config->splitShare == 1
                      : from->shares;
  if (!state->own) state->aborted = from->aborted;
  *made = new ncclComm{state};
  return charge(*state);
}
ncclResult_t ncclCommInitRank(ncclComm_t* comm, int size, ncclUniqueId id, int rank) {
  return ncclCommInitRankConfig(comm, size, id, rank, nullptr);
}

ncclResult_t ncclCommFinalize(ncclComm_t) { return ncclSuccess; }
ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  if (comm == nullptr) return ncclSuccess;
  const emulation::Device device;
  const auto state = comm->state;
  if (!state->registered.empty() && !*state->aborted && !emulation::gpu_is_lost())
    emulation::die("an NCCL communicator is destroyed while %zu ranges are registered with it",
                   state->registered.size());
  // What is queued ends first, as NCCL's destruction waits for it.
  emulation::run_until([&] { return *state->aborted || state->finished == state->issued; });
  int finalized = 0;
  MPI_Finalized(&finalized);
  if (!finalized && !*state->aborted && !emulation::gpu_is_lost()) {
    MPI_Comm_free(&state->control);
    MPI_Comm_free(&state->comm);
  }
  if (state->own) emulation::give_back(emulation::nccl_bytes);
  if (state->has_buffers) emulation::give_back(emulation::nccl_buffer_bytes);
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
  *comm->state->aborted = true;
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

ncclResult_t ncclMemAlloc(void** p, std::size_t bytes) {
  if (emulation::call_fails(__func__)) return ncclUnhandledCudaError;
  if (cudaMalloc(p, bytes) != cudaSuccess) return ncclUnhandledCudaError;
  const std::lock_guard lock(memory_mutex);
  allocated[static_cast<char*>(*p)] = bytes;
  return ncclSuccess;
}
ncclResult_t ncclMemFree(void* p) {
  {
    const std::lock_guard lock(memory_mutex);
    const auto at = allocated.find(static_cast<char*>(p));
    if (at == allocated.end())
      emulation::die("ncclMemFree of %p, which ncclMemAlloc did not give", p);
    const emulation::Range range{at->first, at->second};
    for (const emulation::Range& r : registered)
      if (overlap(r, range))
        emulation::die("ncclMemFree of %p, which is registered with a communicator", p);
    allocated.erase(at);
  }
  return cudaFree(p) == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError;
}
// Real NCCL also takes other memory, but then cannot do all that registration is for.
ncclResult_t ncclCommRegister(ncclComm_t comm, void* p, std::size_t bytes, void** handle) {
  if (comm == nullptr || *comm->state->aborted || bytes == 0) return ncclInvalidArgument;
  if (emulation::call_fails(__func__)) return ncclUnhandledCudaError;
  const emulation::Range range{static_cast<char*>(p), bytes};
  const std::lock_guard lock(memory_mutex);
  const auto next = allocated.upper_bound(range.begin);
  if (next == allocated.begin()) return ncclInvalidArgument;
  const auto& [begin, size] = *std::prev(next);
  if (range.begin + bytes > begin + size) return ncclInvalidArgument;
  for (const auto& [other, r] : comm->state->registered)
    if (overlap(r, range)) emulation::die("%p is registered twice with one communicator", p);
  registered.push_back(range);
  *handle = new char;
  comm->state->registered[*handle] = range;
  return ncclSuccess;
}
ncclResult_t ncclCommDeregister(ncclComm_t comm, void* handle) {
  if (comm == nullptr) return ncclInvalidArgument;
  const std::lock_guard lock(memory_mutex);
  const auto at = comm->state->registered.find(handle);
  if (at == comm->state->registered.end()) return ncclInvalidArgument;
  const emulation::Range range = at->second;
  comm->state->registered.erase(at);
  delete static_cast<char*>(handle);
  registered.erase(std::ranges::find_if(
      registered, [&](const auto& r) { return r.begin == range.begin && r.bytes == range.bytes; }));
  return ncclSuccess;
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
