#include "parallel/nccl_collectives.h"

#include <cstdlib>
#include <string>

#include "core/error.h"
#include "core/host.h"
#include "core/log.h"
#include "core/mpi.h"
#include "ops/optimizer.h"
#include "tensor/device_cuda.h"

namespace weft {
namespace {

// bf16 elements to send, and as many to receive.
constexpr std::int64_t scratch_elements = std::int64_t{1} << 24;

ncclDataType_t nccl_type(DType t) {
  switch (t) {
    case DType::f32:
      return ncclFloat32;
    case DType::f64:
      return ncclFloat64;
    case DType::bf16:
      return ncclBfloat16;
    case DType::i64:
      return ncclInt64;
    case DType::i32:
      return ncclInt32;
    case DType::f16:  // two bytes, never summed
      return ncclBfloat16;
    case DType::u8:
    case DType::boolean:
      return ncclUint8;
  }
  return ncclUint8;
}

std::byte* at(const Tensor& t, std::int64_t first) {
  return static_cast<std::byte*>(t.raw()) + first * static_cast<std::int64_t>(size_of(t.dtype()));
}

cudaStream_t stream() { return cuda_stream(Stream::communication); }

// Runs the sends and receives between its construction and end() together. The destructor closes
// the group also when a call in it failed.
class Group {
 public:
  Group() { NCCL_CHECK(ncclGroupStart()); }
  ~Group() {
    if (open_) (void)ncclGroupEnd();
  }
  void end() {
    open_ = false;
    NCCL_CHECK(ncclGroupEnd());
  }

 private:
  bool open_ = true;
};

Tensor piece(const Tensor& t, Part where) { return t.slice(where.begin, where.end); }
// The elements [first, first + length) of a part, as far as it has them.
Part piece_at(const Part& p, std::int64_t first, std::int64_t length) {
  return {std::min(p.begin + first, p.end), std::min(p.begin + first + length, p.end)};
}

}  // namespace

void check_nccl(ncclResult_t result, ncclComm_t comm, const char* call, int line) {
  if (result == ncclSuccess) return;
  throw_if_gpu_failed(call, __FILE__, line);
  const char* last = ncclGetLastError(comm);
  // NCCL takes its buffers with the first operations, when weft's memory is laid out.
  constexpr std::size_t little = std::size_t{1} << 30;
  std::size_t free = little, total = 0;
  cudaMemGetInfo(&free, &total);
  throw Error(
      Exit::hardware,
      fmt::format("NCCL: {} in {}{}{}", ncclGetErrorString(result), call,
                  last != nullptr && *last != '\0' ? ": " : "", last != nullptr ? last : ""),
      free < little
          ? fmt::format("{} MiB of the GPU's memory are free, perhaps too little for NCCL's "
                        "buffers: set memory.arena_gib to little more than the activations of the "
                        "log's line \"memory\"; else run again with NCCL_DEBUG=INFO, and see "
                        "weft doctor",
                        free >> 20)
          : "run again with NCCL_DEBUG=INFO; weft doctor checks GPUs and network",
      __FILE__, line);
}

Nodes::Nodes(MPI_Comm world) {
  const char* id = std::getenv("NCCL_HOSTID");
  const std::string mine = id != nullptr ? id : host_name();
  std::vector<std::string> names;
  int rank = 0, me = 0;
  MPI_Comm_rank(world, &me);
  for (const std::string& name : texts_of_ranks(mine, world)) {
    const auto at = static_cast<std::size_t>(std::ranges::find(names, name) - names.begin());
    if (at == names.size()) {
      names.push_back(name);
      ranks.emplace_back();
    }
    if (rank == me) {
      node = static_cast<int>(at);
      place = static_cast<int>(ranks[at].size());
    }
    ranks[at].push_back(rank++);
  }
}

NcclCollectives::~NcclCollectives() {
  if (scratch_ != nullptr) device_runtime().free(scratch_);
}

void NcclCollectives::end() {
  for (ncclComm_t* made : {&between_, &inside_})
    if (*made != nullptr) ncclCommDestroy(std::exchange(*made, nullptr));
}

void NcclCollectives::all_reduce(const Tensor& t, CommDtype comm_dtype) {
  if (t.numel() == 0) return;
  if (comm_dtype == CommDtype::bf16 && t.dtype() == DType::f32) {
    if (size_ == 1) return;
    sum_as_bf16(t);
    gather_as_bf16(t);
    return;
  }
  NCCL_CHECK(ncclAllReduce(t.raw(), t.raw(), static_cast<std::size_t>(t.numel()),
                           nccl_type(t.dtype()), ncclSum, comm_, stream()));
}

void NcclCollectives::reduce_scatter(const Tensor& t, CommDtype comm_dtype) {
  if (t.numel() == 0) return;
  if (comm_dtype == CommDtype::bf16) return sum_as_bf16(t);
  if (equal_parts(t)) {
    // ncclReduceScatter takes equal parts only; uneven ones take one reduction per owner, below.
    NCCL_CHECK(ncclReduceScatter(t.raw(), at(t, part(t, rank_).begin),
                                 static_cast<std::size_t>(t.numel() / size_), ncclFloat32, ncclSum,
                                 comm_, stream()));
    return;
  }
  Group group;
  for (int r = 0; r < size_; ++r) {
    const Part p = part(t, r);
    if (p.size() > 0)
      NCCL_CHECK(ncclReduce(at(t, p.begin), at(t, p.begin), static_cast<std::size_t>(p.size()),
                            ncclFloat32, ncclSum, r, comm_, stream()));
  }
  group.end();
}

void NcclCollectives::all_gather(const Tensor& t) {
  if (t.numel() == 0) return;
  if (equal_parts(t)) {
    // ncclAllGather takes equal parts only; uneven ones take one broadcast per owner, below.
    NCCL_CHECK(ncclAllGather(at(t, part(t, rank_).begin), t.raw(),
                             static_cast<std::size_t>(t.numel() / size_), nccl_type(t.dtype()),
                             comm_, stream()));
    return;
  }
  Group group;
  for (int r = 0; r < size_; ++r) {
    const Part p = part(t, r);
    if (p.size() > 0)
      NCCL_CHECK(ncclBroadcast(at(t, p.begin), at(t, p.begin), static_cast<std::size_t>(p.size()),
                               nccl_type(t.dtype()), r, comm_, stream()));
  }
  group.end();
}

void NcclCollectives::all_to_all(const Tensor& from, const std::vector<std::int64_t>& from_counts,
                                 const Tensor& to, const std::vector<std::int64_t>& to_counts) {
  Group group;
  std::int64_t out = 0, in = 0;
  for (int r = 0; r < size_; ++r) {
    const std::int64_t sent = from_counts[r];
    const std::int64_t awaited = to_counts[r];
    const auto bytes = static_cast<std::size_t>(sent) * size_of(from.dtype());
    if (r == rank_ && sent > 0)
      device_runtime().copy(at(to, in), at(from, out), bytes, Stream::communication);
    if (r != rank_ && sent > 0)
      NCCL_CHECK(ncclSend(at(from, out), static_cast<std::size_t>(sent), nccl_type(from.dtype()), r,
                          comm_, stream()));
    if (r != rank_ && awaited > 0)
      NCCL_CHECK(ncclRecv(at(to, in), static_cast<std::size_t>(awaited), nccl_type(to.dtype()), r,
                          comm_, stream()));
    out += sent;
    in += awaited;
  }
  group.end();
}

bf16* NcclCollectives::scratch() {
  if (scratch_ == nullptr)
    scratch_ = device_runtime().allocate(2 * scratch_elements * sizeof(bf16), false);
  return static_cast<bf16*>(scratch_);
}

// Afterwards this rank's part holds the sum.
void NcclCollectives::sum_as_bf16(const Tensor& t) {
  if (size_ == 1) return;
  if (!nodes_.two_levels()) {
    if (!nodes_.even() && rank_ == 0 && !std::exchange(warned_, true)) warn_of_unequal_nodes();
    return exchange_and_sum(t, comm_, everyone_, rank_);
  }
  if (between_ == nullptr) {
    inside_ = split_(nodes_.node, nodes_.place);
    between_ = split_(nodes_.place, nodes_.node);
  }
  sum_inside_nodes(t);
  std::vector<int> of_place;  // one rank of each node
  for (const std::vector<int>& node : nodes_.ranks)
    of_place.push_back(node[static_cast<std::size_t>(nodes_.place)]);
  exchange_and_sum(t, between_, of_place, nodes_.node);
}

void NcclCollectives::warn_of_unequal_nodes() const {
  std::size_t most = 0;
  for (const std::vector<int>& node : nodes_.ranks) most = std::max(most, node.size());
  const double n = size_, m = static_cast<double>(most), bytes = 2 * m * (n - m) / n;
  if (bytes <= 4) return;
  log::warn(
      "the {} nodes have unequal numbers of ranks, so gradients in bf16 are not summed inside each "
      "node first: every step the network cards of a node with {} take in {:.1f} bytes a gradient, "
      "against 4 with parallel.wire = \"f32\". Set that, or start as many ranks on every node",
      nodes_.ranks.size(), counted(static_cast<std::int64_t>(most), "rank"), bytes);
}

// Sums inside this node, in f32: on its rank of each place, the parts of all ranks of that place.
void NcclCollectives::sum_inside_nodes(const Tensor& t) {
  Group group;
  for (const std::vector<int>& node : nodes_.ranks) {
    const int first = node.front(), ranks = static_cast<int>(node.size());
    if (equal_parts(t) && node.back() - first == ranks - 1) {
      const Part mine = part(t, node[static_cast<std::size_t>(nodes_.place)]);
      NCCL_CHECK(ncclReduceScatter(at(t, part(t, first).begin), at(t, mine.begin),
                                   static_cast<std::size_t>(mine.size()), ncclFloat32, ncclSum,
                                   inside_, stream()));
      continue;
    }
    for (int place = 0; place < ranks; ++place) {
      const Part p = part(t, node[static_cast<std::size_t>(place)]);
      if (p.size() > 0)
        NCCL_CHECK(ncclReduce(at(t, p.begin), at(t, p.begin), static_cast<std::size_t>(p.size()),
                              ncclFloat32, ncclSum, place, inside_, stream()));
    }
  }
  group.end();
}

// Sums the parts of `ranks` over them, each on its rank. `among` is their communicator, in which
// this rank is `me`.
//
// Handles one piece of every part at a time, so that the scratch memory is bounded: a piece is
// rounded, exchanged, and summed by its owner.
void NcclCollectives::exchange_and_sum(const Tensor& t, ncclComm_t among,
                                       const std::vector<int>& ranks, int me) {
  bf16* const out = scratch();
  bf16* const in = out + scratch_elements;
  const auto rows = [&](bf16* p, std::int64_t first, std::int64_t count, std::int64_t of) {
    return Tensor::borrow(p + first * of, {count, of}, DType::bf16, DeviceKind::cuda);
  };
  const int n = static_cast<int>(ranks.size());
  const std::int64_t length = scratch_elements / n / part_unit * part_unit;
  std::int64_t longest = 0;
  for (const int r : ranks) longest = std::max(longest, part(t, r).size());
  for (std::int64_t first = 0; first < longest; first += length) {
    const auto where = [&](int i) { return piece_at(part(t, ranks[i]), first, length); };
    const Part mine = where(me);
    // Row i of `out` goes to the i-th rank; the rows of `in` are the terms of this rank's sum, its
    // own among them.
    for (int i = 0; i < n; ++i) {
      const Part p = where(i);
      if (p.size() == 0) continue;
      Tensor row =
          i == me ? rows(in, i, 1, mine.size())
                  : Tensor::borrow(out + i * length, {p.size()}, DType::bf16, DeviceKind::cuda);
      ops::convert_on_stream(piece(t, p), row, Stream::communication);
    }
    Group exchange;
    for (int i = 0; i < n; ++i) {
      const Part p = where(i);
      if (i != me && p.size() > 0)
        NCCL_CHECK(ncclSend(out + i * length, static_cast<std::size_t>(p.size()), ncclBfloat16, i,
                            among, stream()));
      if (i != me && mine.size() > 0)
        NCCL_CHECK(ncclRecv(in + i * mine.size(), static_cast<std::size_t>(mine.size()),
                            ncclBfloat16, i, among, stream()));
    }
    exchange.end();
    Tensor sum = piece(t, mine);
    if (mine.size() > 0) ops::sum_parts(rows(in, 0, n, mine.size()), sum, Stream::communication);
  }
}

// Rounds every rank's part and copies it to all ranks, again by pieces.
void NcclCollectives::gather_as_bf16(const Tensor& t) {
  bf16* const out = scratch();
  bf16* const in = out + scratch_elements;
  const std::int64_t length = scratch_elements / size_ / part_unit * part_unit;
  std::int64_t longest = 0;
  for (int r = 0; r < size_; ++r) longest = std::max(longest, part(t, r).size());
  for (std::int64_t first = 0; first < longest; first += length) {
    const auto where = [&](int r) { return piece_at(part(t, r), first, length); };
    // Every rank sends as much as the longest piece has; the tail behind a shorter one is never
    // read.
    std::int64_t most = 0;
    for (int r = 0; r < size_; ++r) most = std::max(most, where(r).size());
    const Tensor mine = piece(t, where(rank_));
    Tensor rounded = Tensor::borrow(out, {mine.numel()}, DType::bf16, DeviceKind::cuda);
    if (mine.numel() > 0) ops::convert_on_stream(mine, rounded, Stream::communication);
    NCCL_CHECK(
        ncclAllGather(out, in, static_cast<std::size_t>(most), ncclBfloat16, comm_, stream()));
    for (int r = 0; r < size_; ++r) {
      Tensor to = piece(t, where(r));
      if (to.numel() > 0)
        ops::convert_on_stream(
            Tensor::borrow(in + r * most, {to.numel()}, DType::bf16, DeviceKind::cuda), to,
            Stream::communication);
    }
  }
}

}  // namespace weft
