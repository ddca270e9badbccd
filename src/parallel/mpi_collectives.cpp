#include "parallel/mpi_collectives.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <thread>

#include "core/error.h"
#include "ops/reduce.h"

namespace weft {

namespace {

constexpr std::array<const char*, 4> kind_names = {"all-reduce", "reduce-scatter", "all-gather",
                                                   "all-to-all"};
// Up to this size every rank sends its whole tensor to all others: one exchange instead of two.
constexpr std::size_t small_bytes = std::size_t{64} << 10;
constexpr std::int64_t sum_block = 4096;  // elements: all terms of a block stay in the L1 cache
constexpr std::size_t count_bytes = 64;   // element count ahead of an all-to-all's piece

std::int64_t rounds_for(std::int64_t count, std::int64_t piece) {
  return std::max<std::int64_t>(1, (count + piece - 1) / piece);
}

// Piece `k` of a part, empty where it has none.
Part piece_of(Part part, std::int64_t k, std::int64_t piece) {
  const std::int64_t begin = std::min(part.begin + std::max<std::int64_t>(k, 0) * piece, part.end);
  return {begin, k < 0 ? begin : std::min(begin + piece, part.end)};
}

constexpr const char* differ_hint =
    "the ranks have taken different ways through the program: the deck, the environment and the "
    "binary must be the same on all of them; otherwise this is a bug in weft";

}  // namespace

Watchdog::Collective MpiOperation::record() const {
  // What an all-to-all moves differs from rank to rank.
  return {kind_names[static_cast<std::size_t>(kind)], comm_dtype,
          kind == CollectiveKind::all_to_all
              ? 0
              : static_cast<std::uint64_t>(to.numel()) * size_of(comm_dtype)};
}

MpiCollectives::MpiCollectives(MPI_Comm comm, const std::atomic<bool>& stop)
    : stop_(stop), boxes_(comm, stop), memory_(2 * boxes_.room(), stop) {
  MPI_Comm_rank(comm, &rank_);
  MPI_Comm_size(comm, &size_);
  rounded_.resize(sum_block * sizeof(float));
}

bool MpiCollectives::run(std::uint64_t number, const MpiOperation& o) {
  const Watchdog::Collective record = o.record();
  label_ = {number, static_cast<std::uint32_t>(o.kind), static_cast<std::uint32_t>(o.comm_dtype),
            record.bytes, 1};
  const auto done = [&] {
    switch (o.kind) {
      case CollectiveKind::all_reduce:
        return record.bytes <= std::min(small_bytes, boxes_.room()) ? reduce_small(o) : reduce(o);
      case CollectiveKind::reduce_scatter:
        return reduce(o);
      case CollectiveKind::all_gather:
        return gather(o);
      case CollectiveKind::all_to_all:
        return exchange(o);
    }
    return false;
  };
  return done() && memory_.flush();
}

// Each round handles one piece of every rank's part: the other ranks send their contributions to
// the part's owner. In an all-reduce the box also carries the sum that this rank finished `behind`
// rounds earlier, so that both directions overlap.
bool MpiCollectives::reduce(const MpiOperation& o) {
  const auto piece = static_cast<std::int64_t>(boxes_.room() / size_of(o.comm_dtype));
  const auto part = [&](int r) { return part_of(0, o.to.numel(), r, size_); };
  std::int64_t longest = 0;
  for (int r = 0; r < size_; ++r) longest = std::max(longest, part(r).size());
  const std::int64_t pieces = rounds_for(longest, piece);
  const bool gathers = o.kind == CollectiveKind::all_reduce;
  // fill(k) sends the sum of round k - behind. Filling at most `behind` rounds ahead ensures that
  // take(k - behind) has already computed it.
  const std::int64_t behind = std::min(pieces, boxes_.depth() - 1);
  const auto fill = [&](std::int64_t k) {
    for (int r = 0; r < size_; ++r) {
      if (r == rank_) continue;
      const Part where = piece_of(part(r), k, piece);
      if (!pack(o, o.to, where, boxes_.for_rank(r))) return false;
      each_[static_cast<std::size_t>(r)] =
          static_cast<std::size_t>(where.size()) * size_of(o.comm_dtype);
    }
    const Part summed = gathers ? piece_of(part(rank_), k - behind, piece) : Part{};
    if (!pack(o, o.to, summed, boxes_.for_all())) return false;
    boxes_.post(static_cast<std::size_t>(summed.size()) * size_of(o.comm_dtype), each_);
    return true;
  };
  const auto take = [&](std::int64_t k) {
    if (!add(o, piece_of(part(rank_), k, piece), gathers && o.comm_dtype != o.to.dtype(),
             [&](int r) { return boxes_.from_rank(r); }))
      return false;
    for (int r = 0; gathers && r < size_; ++r)
      if (r != rank_ && !unpack(o, piece_of(part(r), k - behind, piece), boxes_.from_all(r)))
        return false;
    return true;
  };
  return run_rounds(gathers ? pieces + behind : pieces, gathers ? behind : boxes_.depth(), fill,
                    take);
}

bool MpiCollectives::reduce_small(const MpiOperation& o) {
  const Part whole{0, o.to.numel()};
  return run_rounds(
      1, 1,
      [&](std::int64_t) {
        if (!pack(o, o.to, whole, boxes_.for_all())) return false;
        boxes_.post(static_cast<std::size_t>(whole.size()) * size_of(o.comm_dtype), {});
        return true;
      },
      [&](std::int64_t) {
        return add(o, whole, o.comm_dtype != o.to.dtype(),
                   [&](int r) { return boxes_.from_all(r); });
      });
}

bool MpiCollectives::gather(const MpiOperation& o) {
  const auto piece = static_cast<std::int64_t>(boxes_.room() / size_of(o.comm_dtype));
  const auto part = [&](int r) { return part_of(0, o.to.numel(), r, size_); };
  std::int64_t longest = 0;
  for (int r = 0; r < size_; ++r) longest = std::max(longest, part(r).size());
  return run_rounds(
      rounds_for(longest, piece), boxes_.depth(),
      [&](std::int64_t k) {
        const Part where = piece_of(part(rank_), k, piece);
        if (!pack(o, o.to, where, boxes_.for_all())) return false;
        boxes_.post(static_cast<std::size_t>(where.size()) * size_of(o.comm_dtype), {});
        return true;
      },
      [&](std::int64_t k) {
        for (int r = 0; r < size_; ++r)
          if (r != rank_ && !unpack(o, piece_of(part(r), k, piece), boxes_.from_all(r)))
            return false;
        return true;
      });
}

// Every piece carries the total element count, so that two ranks that disagree detect it.
bool MpiCollectives::exchange(const MpiOperation& o) {
  const auto piece =
      static_cast<std::int64_t>((boxes_.room() - count_bytes) / size_of(o.comm_dtype));
  const auto part = [](const std::vector<std::int64_t>& counts, int r) {
    Part p;
    for (int k = 0; k <= r; ++k) {
      p.begin = p.end;
      p.end += counts[static_cast<std::size_t>(k)];
    }
    return p;
  };
  const Part mine = part(o.from_counts, rank_), here = part(o.to_counts, rank_);
  WEFT_CHECK(mine.size() == here.size(), Exit::hang, differ_hint,
             "collective {}: rank {} sends itself {} elements and awaits {}", label_.number, rank_,
             mine.size(), here.size());
  for (std::int64_t k = 0; k * piece < mine.size(); ++k) {
    const Part from = piece_of(mine, k, piece);
    const std::byte* p = memory_.read(o.from, from.begin, from.size());
    if (p == nullptr || !unpack(o, piece_of(here, k, piece), p)) return false;
  }
  const std::int64_t most = *std::max_element(o.from_counts.begin(), o.from_counts.end());
  return run_rounds(
      rounds_for(most, piece), boxes_.depth(),
      [&](std::int64_t k) {
        for (int r = 0; r < size_; ++r) {
          if (r == rank_) continue;
          const Part all = part(o.from_counts, r), where = piece_of(all, k, piece);
          const std::int64_t count = all.size();
          std::memcpy(boxes_.for_rank(r), &count, sizeof count);
          if (!pack(o, o.from, where, boxes_.for_rank(r) + count_bytes)) return false;
          each_[static_cast<std::size_t>(r)] =
              count_bytes + static_cast<std::size_t>(where.size()) * size_of(o.comm_dtype);
        }
        boxes_.post(0, each_);
        return true;
      },
      [&](std::int64_t k) {
        for (int r = 0; r < size_; ++r) {
          if (r == rank_ || k >= rounds_[static_cast<std::size_t>(r)]) continue;
          const Part all = part(o.to_counts, r);
          std::int64_t count = 0;
          std::memcpy(&count, boxes_.from_rank(r), sizeof count);
          WEFT_CHECK(count == all.size(), Exit::hang, differ_hint,
                     "collective {}: rank {} sends {} elements to rank {}, which awaits {}",
                     label_.number, r, count, rank_, all.size());
          if (!unpack(o, piece_of(all, k, piece), boxes_.from_rank(r) + count_bytes)) return false;
        }
        return true;
      });
}

// Fills boxes up to `ahead` rounds before the other ranks' boxes have arrived, and takes theirs as
// they come.
bool MpiCollectives::run_rounds(std::int64_t rounds, std::int64_t ahead, const Step& fill,
                                const Step& take) {
  label_.rounds = static_cast<std::uint64_t>(rounds);
  rounds_.assign(static_cast<std::size_t>(size_), rounds);
  each_.assign(static_cast<std::size_t>(size_), 0);
  std::int64_t filled = 0, taken = 0, last = rounds;
  while (filled < rounds || taken < last) {
    if (stop_) return false;
    // Read the bell before looking for work: if it rings after this line, wait() returns at once.
    const std::uint32_t mark = boxes_.mark();
    bool moved = false, full = false;
    if (filled < rounds && filled < taken + ahead) {
      full = !boxes_.vacant();
      if (!full) {
        boxes_.label() = label_;
        if (!fill(filled++)) return false;
        moved = true;
      }
    }
    if (taken < last && all_here(taken)) {
      // In an all-to-all the ranks may have different numbers of rounds; their labels give them.
      last = *std::max_element(rounds_.begin(), rounds_.end());
      if (!take(taken)) return false;
      for (int r = 0; r < size_; ++r)
        if (r != rank_ && taken < rounds_[static_cast<std::size_t>(r)]) boxes_.release(r);
      ++taken;
      moved = true;
    }
    if (moved)
      boxes_.moved();
    else if (!boxes_.wait(mark, full))
      return false;
  }
  return true;
}

bool MpiCollectives::all_here(std::int64_t round) {
  for (int r = 0; r < size_; ++r) {
    auto& rounds = rounds_[static_cast<std::size_t>(r)];
    if (r == rank_ || (round > 0 && round >= rounds)) continue;
    if (!boxes_.arrived(r)) return false;
    compare(r);
    rounds = static_cast<std::int64_t>(boxes_.label(r).rounds);
  }
  return true;
}

void MpiCollectives::compare(int peer) const {
  const BoxLabel& theirs = boxes_.label(peer);
  if (theirs.number == label_.number && theirs.kind == label_.kind &&
      theirs.dtype == label_.dtype && theirs.bytes == label_.bytes)
    return;
  throw OtherCollective(Exit::hang,
                        fmt::format("collective {} is another one on rank {} than on rank {}",
                                    label_.number, peer, rank_),
                        differ_hint, __FILE__, __LINE__);
}

// pack() and unpack() convert to and from the communication dtype.
bool MpiCollectives::pack(const MpiOperation& o, const Tensor& t, Part where, std::byte* to) {
  if (where.size() == 0) return true;
  const std::byte* from = memory_.read(t, where.begin, where.size());
  if (from != nullptr) ops::convert_range(from, t.dtype(), to, o.comm_dtype, where.size());
  return from != nullptr;
}

bool MpiCollectives::unpack(const MpiOperation& o, Part where, const std::byte* from) {
  if (where.size() == 0) return true;
  std::byte* to = memory_.write(o.to, where.begin);
  if (to == nullptr) return false;
  ops::convert_range(from, o.comm_dtype, to, o.to.dtype(), where.size());
  memory_.written(o.to, where.begin, where.size());
  return true;
}

// Sums elements `where` over all ranks: the other ranks' terms come from their boxes, this rank's
// from the tensor, rounded as if it had been sent. Works block by block, so that the tensor can be
// both a term and the sum.
template <class TermOf>
bool MpiCollectives::add(const MpiOperation& o, Part where, bool rounded, TermOf&& term_of) {
  if (where.size() == 0) return true;
  const std::byte* own = memory_.read(o.to, where.begin, where.size());
  std::byte* sum = own != nullptr ? memory_.write(o.to, where.begin) : nullptr;
  if (sum == nullptr) return false;
  const auto width = static_cast<std::int64_t>(size_of(o.to.dtype()));
  const auto comm_dtype = static_cast<std::int64_t>(size_of(o.comm_dtype));
  terms_.resize(static_cast<std::size_t>(size_));
  for (std::int64_t first = 0; first < where.size(); first += sum_block) {
    const std::int64_t count = std::min(sum_block, where.size() - first);
    for (int r = 0; r < size_; ++r)
      terms_[static_cast<std::size_t>(r)] =
          r == rank_ ? own + first * width : term_of(r) + first * comm_dtype;
    if (o.comm_dtype != o.to.dtype()) {
      ops::convert_range(own + first * width, o.to.dtype(), rounded_.data(), o.comm_dtype, count);
      terms_[static_cast<std::size_t>(rank_)] = rounded_.data();
    }
    ops::sum_terms(terms_.data(), size_, o.comm_dtype, count, sum + first * width, rounded);
  }
  memory_.written(o.to, where.begin, where.size());
  return true;
}

MpiMemory::~MpiMemory() {
  for (const Stage& s : {in_, out_[0], out_[1]})
    if (s.memory != nullptr) device_runtime().free_pinned(s.memory);
}

std::byte* MpiMemory::of(Stage& s) {
  if (s.memory == nullptr) s.memory = device_runtime().allocate_pinned(piece_bytes_);
  return static_cast<std::byte*>(s.memory);
}

bool MpiMemory::reached(const DeviceEvent& event) const {
  // Polls with growing pauses instead of blocking in CUDA, so that `stop_` can end the wait.
  if (!event) return true;
  for (auto pause = std::chrono::microseconds(5); !device_runtime().finished(event);
       pause = std::min(pause * 2, std::chrono::microseconds(200))) {
    if (stop_) return false;
    std::this_thread::sleep_for(pause);
  }
  return true;
}

const std::byte* MpiMemory::read(const Tensor& t, std::int64_t first, std::int64_t count) {
  if (t.device() == DeviceKind::cpu || count == 0) return at(t, first);
  std::byte* stage = of(in_);
  device_runtime().copy(stage, at(t, first), static_cast<std::size_t>(count) * size_of(t.dtype()),
                        Stream::communication);
  return reached(device_runtime().record(Stream::communication)) ? stage : nullptr;
}

std::byte* MpiMemory::write(const Tensor& t, std::int64_t first) {
  if (t.device() == DeviceKind::cpu) return at(t, first);
  // Two buffers in turn: one is filled while the copy from the other runs.
  turn_ = (turn_ + 1) % out_.size();
  return reached(out_[turn_].free) ? of(out_[turn_]) : nullptr;
}

void MpiMemory::written(const Tensor& t, std::int64_t first, std::int64_t count) {
  if (t.device() == DeviceKind::cpu || count == 0) return;
  device_runtime().copy(at(t, first), out_[turn_].memory,
                        static_cast<std::size_t>(count) * size_of(t.dtype()),
                        Stream::communication);
  out_[turn_].free = device_runtime().record(Stream::communication);
}

bool MpiMemory::flush() { return reached(out_[0].free) && reached(out_[1].free); }

}  // namespace weft
