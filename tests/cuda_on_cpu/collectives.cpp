// NCCL's operations while they run: device memory is copied to the host, MPI works on the copies
// without blocking, and the result is copied back, so that other streams go on meanwhile and a read
// that comes too early finds the old values.
#include "collectives.h"

#include <atomic>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <string_view>

#include "cuda_bf16.h"
#include "emulation.h"
#include "memory.h"
#include "streams.h"

namespace emulation {
namespace {

struct Part {
  std::vector<std::byte> in, out;
  MPI_Request request = MPI_REQUEST_NULL;
};
// One execution of a group.
struct Execution {
  std::shared_ptr<NcclState> state;
  std::uint64_t number = 0;
  bool started = false;
  std::vector<Part> parts;
};

// bf16 is reduced as f32 and rounded once at the end.
MPI_Datatype mpi_type(ncclDataType_t t) {
  switch (t) {
    case ncclInt8:
      return MPI_INT8_T;
    case ncclUint8:
      return MPI_UINT8_T;
    case ncclInt32:
      return MPI_INT32_T;
    case ncclUint32:
      return MPI_UINT32_T;
    case ncclInt64:
      return MPI_INT64_T;
    case ncclUint64:
      return MPI_UINT64_T;
    case ncclFloat64:
      return MPI_DOUBLE;
    case ncclFloat32:
    case ncclBfloat16:
      return MPI_FLOAT;
  }
  return MPI_DATATYPE_NULL;
}
MPI_Op mpi_operation(ncclRedOp_t o) {
  return o == ncclProd ? MPI_PROD : o == ncclMax ? MPI_MAX : o == ncclMin ? MPI_MIN : MPI_SUM;
}

bool reduces(const Collective& c) {
  return c.kind == Collective::Kind::all_reduce || c.kind == Collective::Kind::reduce ||
         c.kind == Collective::Kind::reduce_scatter;
}

// NVLink's switches add in an order of their own: where they do, sums in f32 differ from call to
// call, alike on every rank.
bool adds_in_switches(const Collective& c) {
  const char *there = std::getenv("WEFT_EMULATION_NVLS"), *chosen = std::getenv("NCCL_ALGO");
  return there != nullptr && *there == '1' && c.type == ncclFloat32 && reduces(c) &&
         (chosen == nullptr || std::string_view(chosen).find("^NVLS") == std::string_view::npos);
}
void add_otherwise(std::vector<std::byte>& sums, unsigned draw) {
  for (std::size_t i = draw % 5; 4 * i < sums.size(); i += 5) {
    float x;
    std::memcpy(&x, sums.data() + 4 * i, 4);
    x = std::nextafter(x, draw / 5 % 2 ? INFINITY : -INFINITY);
    std::memcpy(sums.data() + 4 * i, &x, 4);
  }
}

std::atomic<unsigned long long> operations = 0;

std::vector<std::byte> read(const Collective& c, std::size_t count) {
  std::vector<std::byte> host(count *
                              (reduces(c) && c.type == ncclBfloat16 ? 4 : bytes_of(c.type)));
  if (reduces(c) && c.type == ncclBfloat16) {
    for (std::size_t i = 0; i < count; ++i) {
      const float x = from_bf16(static_cast<const std::uint16_t*>(c.from)[i]);
      std::memcpy(host.data() + 4 * i, &x, 4);
    }
  } else {
    std::memcpy(host.data(), c.from, host.size());
  }
  return host;
}

void write(const Collective& c, const std::vector<std::byte>& host, std::size_t count, int size) {
  if (!reduces(c)) {
    std::memcpy(c.to, host.data(), host.size());
    return;
  }
  const double share = c.operation == ncclAvg ? 1.0 / size : 1.0;
  for (std::size_t i = 0; i < count; ++i) {
    if (c.type == ncclFloat64) {
      double x;
      std::memcpy(&x, host.data() + 8 * i, 8);
      static_cast<double*>(c.to)[i] = x * share;
    } else if (c.type == ncclFloat32 || c.type == ncclBfloat16) {
      float x;
      std::memcpy(&x, host.data() + 4 * i, 4);
      x *= static_cast<float>(share);
      if (c.type == ncclFloat32)
        static_cast<float*>(c.to)[i] = x;
      else
        static_cast<std::uint16_t*>(c.to)[i] = to_bf16(x);
    } else {
      const std::size_t bytes = bytes_of(c.type);
      std::memcpy(static_cast<std::byte*>(c.to) + bytes * i, host.data() + bytes * i, bytes);
    }
  }
}

// MPI counts in int; larger messages are one element of a contiguous type, which no reduction may
// have.
constexpr std::size_t most = 1u << 30;

void start(const Collective& c, Part& part, const NcclState& s) {
  const auto size = static_cast<std::size_t>(s.size);
  const std::size_t bytes = c.count * bytes_of(c.type);
  if (c.count > most || bytes > most)
    die("NCCL over MPI takes at most 1 GiB at once, not %zu bytes", bytes);
  const int n = static_cast<int>(c.count), b = static_cast<int>(bytes);
  using Kind = Collective::Kind;
  switch (c.kind) {
    case Kind::all_reduce:
      part.in = read(c, c.count);
      part.out.resize(part.in.size());
      MPI_Iallreduce(part.in.data(), part.out.data(), n, mpi_type(c.type),
                     mpi_operation(c.operation), s.comm, &part.request);
      break;
    case Kind::reduce:
      part.in = read(c, c.count);
      part.out.resize(part.in.size());
      MPI_Ireduce(part.in.data(), part.out.data(), n, mpi_type(c.type), mpi_operation(c.operation),
                  c.peer, s.comm, &part.request);
      break;
    case Kind::reduce_scatter:
      part.in = read(c, c.count * size);
      part.out.resize(part.in.size() / size);
      MPI_Ireduce_scatter_block(part.in.data(), part.out.data(), n, mpi_type(c.type),
                                mpi_operation(c.operation), s.comm, &part.request);
      break;
    case Kind::all_gather:
      part.in = read(c, c.count);
      part.out.resize(bytes * size);
      MPI_Iallgather(part.in.data(), b, MPI_BYTE, part.out.data(), b, MPI_BYTE, s.comm,
                     &part.request);
      break;
    case Kind::broadcast:
      part.out.resize(bytes);
      if (s.rank == c.peer) part.out = read(c, c.count);
      MPI_Ibcast(part.out.data(), b, MPI_BYTE, c.peer, s.comm, &part.request);
      break;
    case Kind::send:
      part.in = read(c, c.count);
      MPI_Isend(part.in.data(), b, MPI_BYTE, c.peer, 0, s.comm, &part.request);
      break;
    case Kind::receive:
      part.out.resize(bytes);
      MPI_Irecv(part.out.data(), b, MPI_BYTE, c.peer, 0, s.comm, &part.request);
      break;
  }
}

Progress step(const std::vector<Collective>& group, Execution& e) {
  NcclState& s = *e.state;
  // After an abort NCCL's kernels end at once and leave what they leave.
  if (*s.aborted) return Progress::done;
  if (s.finished != e.number) return Progress::blocked;
  if (!e.started) {
    e.started = true;
    e.parts.resize(group.size());
    for (std::size_t i = 0; i < group.size(); ++i) start(group[i], e.parts[i], s);
    return Progress::more;
  }
  for (Part& p : e.parts) {
    int finished = 0;
    MPI_Test(&p.request, &finished, MPI_STATUS_IGNORE);
    if (!finished) return Progress::blocked;
  }
  for (std::size_t i = 0; i < group.size(); ++i)
    if (adds_in_switches(group[i]))
      add_otherwise(e.parts[i].out, s.draw + static_cast<unsigned>(e.number) * 2654435761u);
  for (std::size_t i = 0; i < group.size(); ++i)
    // Only the root of a reduction gets its result.
    if (group[i].kind != Collective::Kind::send &&
        (group[i].kind != Collective::Kind::reduce || group[i].peer == s.rank))
      write(group[i], e.parts[i].out, group[i].count, s.size);
  ++s.finished;
  return Progress::done;
}

}  // namespace

std::size_t bytes_of(ncclDataType_t type) {
  switch (type) {
    case ncclInt8:
    case ncclUint8:
      return 1;
    case ncclBfloat16:
      return 2;
    case ncclInt32:
    case ncclUint32:
    case ncclFloat32:
      return 4;
    case ncclInt64:
    case ncclUint64:
    case ncclFloat64:
      return 8;
  }
  return 0;
}

unsigned long long nccl_operations() { return operations; }

ncclResult_t issue(std::shared_ptr<NcclState> state, std::vector<Collective> group,
                   cudaStream_t stream) {
  const Device device;
  if (*state->aborted) return ncclInvalidUsage;
  if (state->own && !state->has_buffers) {
    if (!charge(nccl_buffer_bytes)) return ncclUnhandledCudaError;
    state->has_buffers = true;
  }
  operations += group.size();
  for (const Collective& c : group) {
    using Kind = Collective::Kind;
    const auto size = static_cast<std::size_t>(state->size);
    const std::size_t bytes = c.count * bytes_of(c.type);
    const std::size_t from = c.kind == Kind::reduce_scatter ? bytes * size : bytes;
    const std::size_t to = c.kind == Kind::all_gather ? bytes * size : bytes;
    const bool reads =
        c.kind != Kind::receive && (c.kind != Kind::broadcast || c.peer == state->rank);
    if (bytes_of(c.type) == 0 || c.peer < 0 || c.peer >= state->size ||
        (reads && where_is(c.from, from) != Where::device) ||
        (c.kind != Kind::send && where_is(c.to, to) != Where::device))
      return ncclInvalidArgument;
  }
  const auto prepare = [state]() -> std::shared_ptr<void> {
    const auto e = std::make_shared<Execution>();
    e->state = state;
    e->number = state->issued++;
    return e;
  };
  const cudaError_t error =
      enqueue(stream, {"an operation of NCCL",
                       [group = std::move(group)](std::shared_ptr<void>& e) {
                         return step(group, *static_cast<Execution*>(e.get()));
                       },
                       prepare});
  return error == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError;
}

}  // namespace emulation
