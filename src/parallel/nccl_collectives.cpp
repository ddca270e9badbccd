#include "parallel/nccl_collectives.h"

#include <algorithm>

#include "core/error.h"
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

}  // namespace

void check_nccl(ncclResult_t result, ncclComm_t comm, const char* call, int line) {
  if (result == ncclSuccess) return;
  const char* last = ncclGetLastError(comm);
  throw Error(
      Exit::hardware,
      fmt::format("NCCL: {} in {}{}{}", ncclGetErrorString(result), call,
                  last != nullptr && *last != '\0' ? ": " : "", last != nullptr ? last : ""),
      "run again with NCCL_DEBUG=INFO; weft doctor checks GPUs and network", __FILE__, line);
}

NcclCollectives::~NcclCollectives() {
  if (scratch_ != nullptr) device_runtime().free(scratch_);
}

void NcclCollectives::all_reduce(const Tensor& t, CommDtype comm_dtype) {
  if (t.numel() == 0) return;
  if (comm_dtype == CommDtype::bf16 && t.dtype() == DType::f32)
    sum_as_bf16(t, true);
  else
    NCCL_CHECK(ncclAllReduce(t.raw(), t.raw(), static_cast<std::size_t>(t.numel()),
                             nccl_type(t.dtype()), ncclSum, comm_, stream()));
}

void NcclCollectives::reduce_scatter(const Tensor& t, CommDtype comm_dtype) {
  if (t.numel() == 0) return;
  if (comm_dtype == CommDtype::bf16) return sum_as_bf16(t, false);
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
    const std::int64_t sent = from_counts[static_cast<std::size_t>(r)];
    const std::int64_t awaited = to_counts[static_cast<std::size_t>(r)];
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

// Handles one piece of every part at a time, so that the scratch memory is bounded: a piece is
// rounded, exchanged, and summed by its owner. For an all-reduce the sum is rounded once more and
// goes back the same way.
void NcclCollectives::sum_as_bf16(const Tensor& t, bool for_all) {
  if (size_ == 1) return;
  if (scratch_ == nullptr)
    scratch_ = device_runtime().allocate(2 * scratch_elements * sizeof(bf16), false);
  auto* out = static_cast<bf16*>(scratch_);
  bf16* in = out + scratch_elements;
  const auto rows = [&](bf16* p, std::int64_t first, std::int64_t count, std::int64_t of) {
    return Tensor::borrow(p + first * of, {count, of}, DType::bf16, DeviceKind::cuda);
  };
  const std::int64_t length = scratch_elements / size_ / part_unit * part_unit;
  std::int64_t longest = 0;
  for (int r = 0; r < size_; ++r) longest = std::max(longest, part(t, r).size());
  for (std::int64_t first = 0; first < longest; first += length) {
    const auto where = [&](int r) {
      const Part p = part(t, r);
      return Part{std::min(p.begin + first, p.end), std::min(p.begin + first + length, p.end)};
    };
    const Part mine = where(rank_);
    // Row r of `out` goes to rank r; the rows of `in` are the terms of this rank's sum, its own
    // among them.
    for (int r = 0; r < size_; ++r) {
      const Part p = where(r);
      if (p.size() == 0) continue;
      Tensor row =
          r == rank_ ? rows(in, r, 1, mine.size())
                     : Tensor::borrow(out + r * length, {p.size()}, DType::bf16, DeviceKind::cuda);
      ops::convert_on_stream(piece(t, p), row, Stream::communication);
    }
    Group exchange;
    for (int r = 0; r < size_; ++r) {
      const Part p = where(r);
      if (r != rank_ && p.size() > 0)
        NCCL_CHECK(ncclSend(out + r * length, static_cast<std::size_t>(p.size()), ncclBfloat16, r,
                            comm_, stream()));
      if (r != rank_ && mine.size() > 0)
        NCCL_CHECK(ncclRecv(in + r * mine.size(), static_cast<std::size_t>(mine.size()),
                            ncclBfloat16, r, comm_, stream()));
    }
    exchange.end();
    Tensor sum = piece(t, mine);
    if (mine.size() > 0)
      ops::sum_parts(rows(in, 0, size_, mine.size()), sum, Stream::communication);
    if (!for_all) continue;
    // Every rank sends as much as the longest piece has; the tail behind a shorter one is never
    // read.
    std::int64_t most = 0;
    for (int r = 0; r < size_; ++r) most = std::max(most, where(r).size());
    Tensor rounded = Tensor::borrow(out, {mine.size()}, DType::bf16, DeviceKind::cuda);
    if (mine.size() > 0) ops::convert_on_stream(sum, rounded, Stream::communication);
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
