#include "parallel/mpi_collectives.h"

#include <sched.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>

#include "core/error.h"
#include "core/mpi.h"
#include "ops/optimizer.h"

namespace weft {
namespace {

// Of one message: long enough that looking for it costs little, and less with many ranks, of which
// each sends one to each.
constexpr std::size_t most_bytes = std::size_t{1} << 20, least_bytes = std::size_t{64} << 10;
constexpr std::size_t all_bytes = std::size_t{4} << 20;
// Up to this size every rank sends its whole tensor to all others: one exchange instead of two.
constexpr std::size_t small_bytes = std::size_t{64} << 10;
constexpr std::int64_t sum_block = 4096;  // elements: all terms of a block stay in the L1 cache
constexpr int looks_when_awaited = 2000;  // before the first sleep, a millisecond or two
constexpr int tag_label = 1, tag_data = 2;

void check_mpi(int result, const char* call, int line) {
  if (result == MPI_SUCCESS) return;
  char text[MPI_MAX_ERROR_STRING] = {};
  int length = 0;
  MPI_Error_string(result, text, &length);
  throw Error(Exit::hardware, fmt::format("MPI: {} in {}", text, call),
              "weft doctor checks the nodes and the network between them", __FILE__, line);
}
#define MPI_CHECK(call) check_mpi((call), #call, __LINE__)

// Piece `k` of a part, empty where it has none.
Part piece_of(Part part, std::int64_t k, std::int64_t piece) {
  const std::int64_t begin = std::min(part.begin + k * piece, part.end);
  return {begin, std::min(begin + piece, part.end)};
}

std::vector<Part> segments(const std::vector<std::int64_t>& counts) {
  std::vector<Part> parts;
  std::int64_t end = 0;
  for (const std::int64_t count : counts) {
    parts.push_back({end, end + count});
    end += count;
  }
  return parts;
}

// Whether messages go to and from the tensor itself.
bool is_sent_as_it_is(const Tensor& t, DType comm_dtype) {
  return t.device() == DeviceKind::cpu && t.dtype() == comm_dtype;
}

std::byte* at(const Tensor& t, std::int64_t first) {
  return static_cast<std::byte*>(t.raw()) + first * static_cast<std::int64_t>(size_of(t.dtype()));
}

constexpr const char* differ_hint =
    "the ranks have taken different ways through the program: the deck, the environment and the "
    "binary must be the same on all of them; otherwise this is a bug in weft";

}  // namespace

Collective MpiOperation::record() const {
  // What an all-to-all moves differs from rank to rank.
  return {kind, comm_dtype,
          kind == CollectiveKind::all_to_all
              ? 0
              : static_cast<std::uint64_t>(to.numel()) * size_of(comm_dtype)};
}

MpiCollectives::MpiCollectives(MPI_Comm comm, const std::atomic<bool>& stop)
    : comm_(comm), stop_(stop) {
  MPI_Comm_rank(comm_, &rank_);
  MPI_Comm_size(comm_, &size_);
  MPI_Comm_set_errhandler(comm_, MPI_ERRORS_RETURN);
  labels_out_.resize(size_);
  labels_in_.resize(size_);
  piece_bytes_ = std::clamp(all_bytes / static_cast<std::size_t>(size_), least_bytes, most_bytes);
  rounded_.resize(sum_block * sizeof(float));
}

MpiCollectives::~MpiCollectives() {
  if (pinned_ != nullptr) device_runtime().free_pinned(pinned_);
  if (label_requests_.empty() && rounds_[0].requests.empty() && rounds_[1].requests.empty()) return;
  // An operation was abandoned, and MPI may still use its buffers: leave them where they are.
  new std::vector<Label>(std::move(labels_out_));
  new std::vector<Label>(std::move(labels_in_));
  new std::array<Round, 2>(std::move(rounds_));
}

bool MpiCollectives::run(std::uint64_t number, const MpiOperation& o, bool awaited) {
  awaited_ = awaited;
  send_labels(number, o);
  if (o.kind == CollectiveKind::all_to_all) {
    const Parts out = segments(o.from_counts), in = segments(o.to_counts);
    return compare_labels(o) && copy_own(o, out[rank_], in[rank_]) &&
           exchange(o, o.from, out, in, Taking::place);
  }
  const bool reduces = o.kind != CollectiveKind::all_gather;
  const bool gathers = o.kind != CollectiveKind::reduce_scatter;
  if (reduces && gathers && o.record().bytes <= small_bytes) {
    const Parts whole(size_, Part{0, o.to.numel()});
    return exchange(o, o.to, whole, whole, Taking::add);
  }
  Parts parts;
  for (int r = 0; r < size_; ++r) parts.push_back(part_of(0, o.to.numel(), r, size_));
  const Parts mine(size_, parts[rank_]);
  return (!reduces || exchange(o, o.to, parts, mine, Taking::add)) &&
         (!gathers || exchange(o, o.to, mine, parts, Taking::place));
}

void MpiCollectives::send_labels(std::uint64_t number, const MpiOperation& o) {
  const Label label{number, o.record()};
  compared_ = false;
  for (int k = 1; k < size_; ++k) {
    const int peer = (rank_ + k) % size_;  // not all ranks to the same one at once
    labels_out_[peer] = label;
    if (!o.from_counts.empty()) labels_out_[peer].elements = o.from_counts[peer];
    MPI_CHECK(MPI_Irecv(&labels_in_[peer], sizeof label, MPI_BYTE, peer, tag_label, comm_,
                        &label_requests_.emplace_back()));
    MPI_CHECK(MPI_Isend(&labels_out_[peer], sizeof label, MPI_BYTE, peer, tag_label, comm_,
                        &label_requests_.emplace_back()));
  }
}

// Waits until all ranks are in this operation. False: stopped.
bool MpiCollectives::compare_labels(const MpiOperation& o) {
  if (std::exchange(compared_, true)) return true;
  if (!finish(label_requests_, false)) return false;
  for (int r = 0; r < size_; ++r) {
    if (r == rank_) continue;
    const Label &ours = labels_out_[r], &theirs = labels_in_[r];
    if (theirs.number != ours.number || theirs.what != ours.what)
      throw OtherCollective(Exit::hang,
                            fmt::format("collective {} is another one on rank {} than on rank {}",
                                        ours.number, r, rank_),
                            differ_hint, __FILE__, __LINE__);
    WEFT_CHECK(o.to_counts.empty() || theirs.elements == o.to_counts[r], Exit::hang, differ_hint,
               "collective {}: rank {} sends {} elements to rank {}, which awaits {}", ours.number,
               r, theirs.elements, rank_, o.to_counts[r]);
  }
  return true;
}

// Sends out[r] of `from` to each other rank r and takes in[r] of `o.to` from it, piece by piece,
// with two rounds of messages under way. False: stopped.
bool MpiCollectives::exchange(const MpiOperation& o, const Tensor& from, const Parts& out,
                              const Parts& in, Taking taking) {
  const auto piece = static_cast<std::int64_t>(piece_bytes_ / size_of(o.comm_dtype));
  std::int64_t longest = 0;
  for (int r = 0; r < size_; ++r) longest = std::max({longest, out[r].size(), in[r].size()});
  const std::int64_t rounds = (longest + piece - 1) / piece;
  // What another rank's other collective sends must not land in a tensor.
  if (taking == Taking::place && !compare_labels(o)) return false;
  for (std::int64_t k = 0; k <= rounds; ++k) {
    if (k < rounds && !start(rounds_[k % 2], o, from, out, in, taking, k)) return false;
    if (!compare_labels(o)) return false;
    if (k > 0 && !take(rounds_[(k - 1) % 2], o, in, taking, k - 1)) return false;
  }
  return true;
}

bool MpiCollectives::start(Round& round, const MpiOperation& o, const Tensor& from,
                           const Parts& out, const Parts& in, Taking taking, std::int64_t k) {
  const std::size_t width = size_of(o.comm_dtype);
  const auto piece = static_cast<std::int64_t>(piece_bytes_ / width);
  const bool packs = !is_sent_as_it_is(from, o.comm_dtype);
  const bool in_place = taking == Taking::place && is_sent_as_it_is(o.to, o.comm_dtype);
  if (packs) round.out.resize(piece_bytes_ * static_cast<std::size_t>(size_));
  if (!in_place) round.in.resize(piece_bytes_ * static_cast<std::size_t>(size_));
  for (int step = 1; step < size_; ++step) {
    const int peer = (rank_ - step + size_) % size_;
    const Part where = piece_of(in[peer], k, piece);
    if (where.size() == 0) continue;
    std::byte* const to = in_place
                              ? at(o.to, where.begin)
                              : round.in.data() + piece_bytes_ * static_cast<std::size_t>(peer);
    MPI_CHECK(MPI_Irecv(to, static_cast<int>(static_cast<std::size_t>(where.size()) * width),
                        MPI_BYTE, peer, tag_data, comm_, &round.requests.emplace_back()));
  }
  for (int step = 1; step < size_; ++step) {
    const int peer = (rank_ + step) % size_;
    const Part where = piece_of(out[peer], k, piece);
    if (where.size() == 0) continue;
    const std::byte* bytes = read(from, where);
    if (bytes == nullptr) return false;
    if (packs) {
      std::byte* const packed = round.out.data() + piece_bytes_ * static_cast<std::size_t>(peer);
      ops::convert_range(bytes, from.dtype(), packed, o.comm_dtype, where.size());
      bytes = packed;
    }
    MPI_CHECK(MPI_Isend(bytes, static_cast<int>(static_cast<std::size_t>(where.size()) * width),
                        MPI_BYTE, peer, tag_data, comm_, &round.requests.emplace_back()));
  }
  return true;
}

bool MpiCollectives::take(Round& round, const MpiOperation& o, const Parts& in, Taking taking,
                          std::int64_t k) {
  if (!finish(round.requests, true)) return false;
  const auto piece = static_cast<std::int64_t>(piece_bytes_ / size_of(o.comm_dtype));
  if (taking == Taking::add) return add(round, o, piece_of(in[rank_], k, piece));
  if (is_sent_as_it_is(o.to, o.comm_dtype)) return true;
  for (int r = 0; r < size_; ++r)
    if (r != rank_ &&
        !write(o.to, piece_of(in[r], k, piece),
               round.in.data() + piece_bytes_ * static_cast<std::size_t>(r), o.comm_dtype))
      return false;
  return true;
}

// Sums elements `where` over all ranks: the other ranks' terms come from their messages, this
// rank's from the tensor, rounded as if it had been sent. Block by block, so that the tensor can be
// both a term and the sum.
bool MpiCollectives::add(Round& round, const MpiOperation& o, Part where) {
  if (where.size() == 0) return true;
  const DType type = o.to.dtype();
  const auto width = static_cast<std::int64_t>(size_of(type));
  const auto sent_width = static_cast<std::int64_t>(size_of(o.comm_dtype));
  const bool rounded = o.comm_dtype != type;
  const std::byte* own = read(o.to, where);
  if (own == nullptr) return false;
  // On a GPU the sum is made where its own term is, and goes back from there.
  std::byte* const sum = const_cast<std::byte*>(own);
  terms_.resize(size_);
  for (std::int64_t first = 0; first < where.size(); first += sum_block) {
    const std::int64_t count = std::min(sum_block, where.size() - first);
    for (int r = 0; r < size_; ++r)
      terms_[r] = round.in.data() + piece_bytes_ * static_cast<std::size_t>(r) + first * sent_width;
    terms_[rank_] = own + first * width;
    if (rounded) {
      ops::convert_range(own + first * width, type, rounded_.data(), o.comm_dtype, count);
      terms_[rank_] = rounded_.data();
    }
    ops::sum_terms(terms_.data(), size_, o.comm_dtype, count, sum + first * width,
                   rounded && o.kind == CollectiveKind::all_reduce);
  }
  return write(o.to, where, sum, type);
}

bool MpiCollectives::copy_own(const MpiOperation& o, Part from, Part to) {
  WEFT_CHECK(from.size() == to.size(), Exit::hang, differ_hint,
             "rank {} sends itself {} elements in an all-to-all and awaits {}", rank_, from.size(),
             to.size());
  const auto piece = static_cast<std::int64_t>(piece_bytes_ / size_of(o.comm_dtype));
  for (std::int64_t k = 0; k * piece < from.size(); ++k) {
    const std::byte* bytes = read(o.from, piece_of(from, k, piece));
    if (bytes == nullptr || !write(o.to, piece_of(to, k, piece), bytes, o.comm_dtype)) return false;
  }
  return true;
}

// False: stopped. MPI moves messages only inside its calls, so this polls: with pauses that grow
// for longer where another rank may come much later. Each look takes 15 us from the compute thread
// of its core.
bool MpiCollectives::finish(std::vector<MPI_Request>& requests, bool all_are_here) {
  int done = 0;
  const auto look = [&] {
    MPI_CHECK(MPI_Testall(static_cast<int>(requests.size()), requests.data(), &done,
                          MPI_STATUSES_IGNORE));
    return done != 0 || stop_;
  };
  for (int looks = 0; awaited_ && looks < looks_when_awaited && !look(); ++looks) sched_yield();
  if (!look()) wait_asleep(look, all_are_here ? 20e-6 : 0.002);
  if (done != 0) requests.clear();
  return done != 0;
}

const std::byte* MpiCollectives::read(const Tensor& t, Part where) {
  if (t.device() == DeviceKind::cpu) return at(t, where.begin);
  // f32 may be sent as bf16, half as wide.
  if (pinned_ == nullptr) pinned_ = device_runtime().allocate_pinned(2 * piece_bytes_);
  device_runtime().copy(pinned_, at(t, where.begin),
                        static_cast<std::size_t>(where.size()) * size_of(t.dtype()),
                        Stream::communication);
  return reached(device_runtime().record(Stream::communication)) ? static_cast<std::byte*>(pinned_)
                                                                 : nullptr;
}

bool MpiCollectives::write(const Tensor& t, Part where, const std::byte* from, DType type) {
  if (where.size() == 0) return true;
  if (t.device() == DeviceKind::cpu) {
    if (from != at(t, where.begin))
      ops::convert_range(from, type, at(t, where.begin), t.dtype(), where.size());
    return true;
  }
  if (pinned_ == nullptr) pinned_ = device_runtime().allocate_pinned(2 * piece_bytes_);
  if (from != pinned_) ops::convert_range(from, type, pinned_, t.dtype(), where.size());
  device_runtime().copy(at(t, where.begin), pinned_,
                        static_cast<std::size_t>(where.size()) * size_of(t.dtype()),
                        Stream::communication);
  return reached(device_runtime().record(Stream::communication));
}

// Polls with growing pauses instead of blocking in CUDA, so that `stop_` can end the wait.
bool MpiCollectives::reached(const DeviceEvent& event) const {
  if (!event) return true;
  for (auto pause = std::chrono::microseconds(5); !device_runtime().finished(event);
       pause = std::min(pause * 2, std::chrono::microseconds(200))) {
    if (stop_) return false;
    std::this_thread::sleep_for(pause);
  }
  return true;
}

}  // namespace weft
