#include "parallel/mpi_collectives.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <new>
#include <thread>

#include "core/error.h"
#include "core/mpi.h"
#include "ops/optimizer.h"

namespace weft {
namespace {

// Small enough that a rank's boxes stay in a core's cache between writing and reading.
constexpr std::size_t wanted_bytes = std::size_t{1} << 20;
constexpr std::size_t most_room = std::size_t{256} << 10, least_room = std::size_t{16} << 10;
constexpr std::uint64_t least_depth = 4;
// For other hosts: Open MPI sends messages of up to 64 KiB over TCP at once. A longer one first
// asks the receiver, and each answer would wait for a thread that sleeps between its polls.
constexpr std::size_t most_message = std::size_t{60} << 10;
constexpr int tag_all = 1, tag_each = 2;
// Upper bound of the delay that a lost wake-up or an unannounced end costs.
constexpr long longest_sleep_ns = 100'000'000;
constexpr int longest_close_ms = 2000;

void check_mpi(int result, const char* call, int line) {
  if (result == MPI_SUCCESS) return;
  char text[MPI_MAX_ERROR_STRING] = {};
  int length = 0;
  MPI_Error_string(result, text, &length);
  throw Error(Exit::hardware, fmt::format("MPI: {} in {}", text, call),
              "weft doctor checks the nodes and the network between them", __FILE__, line);
}
#define MPI_CHECK(call) check_mpi((call), #call, __LINE__)

long futex(std::atomic<std::uint32_t>& word, int operation, std::uint32_t value,
           const timespec* timeout) {
  static_assert(sizeof(word) == sizeof(std::uint32_t));
  return syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(&word), operation, value, timeout,
                 nullptr, 0);
}

}  // namespace

Mailboxes::Mailboxes(MPI_Comm comm, const std::atomic<bool>& stop) : comm_(comm), stop_(stop) {
  MPI_Comm_rank(comm_, &rank_);
  MPI_Comm_size(comm_, &size_);
  MPI_Comm_set_errhandler(comm_, MPI_ERRORS_RETURN);
  const auto places = static_cast<std::size_t>(size_);
  peers_.resize(places);
  open_window();
  sends_.resize(depth_);
  for (int r = 0; r < size_; ++r) {
    Peer& p = peers_[r];
    if (r == rank_ || p.control != nullptr) continue;
    messages_ = true;
    p.inbox.resize(inbox_bytes() * depth_);
    p.requests.resize(2 * depth_, MPI_REQUEST_NULL);
    for (std::uint64_t k = 0; k < depth_; ++k) receive(r, k);
  }
}

// Every rank creates its own shared memory and maps that of the other ranks on its host. The name
// exists only until all have mapped it, so nothing stays behind however the job ends, and releasing
// the memory needs no other rank.
void Mailboxes::open_window() {
  MPI_Comm node = split_by_host(comm_);
  MPI_CHECK(MPI_Comm_set_errhandler(node, MPI_ERRORS_RETURN));
  int here = 0, place = 0;
  MPI_CHECK(MPI_Comm_size(node, &here));
  MPI_CHECK(MPI_Comm_rank(node, &place));
  std::vector<int> ranks(here);
  MPI_CHECK(MPI_Allgather(&rank_, 1, MPI_INT, ranks.data(), 1, MPI_INT, node));
  // Boxes to other hosts are smaller but more numerous, and never put more bytes in flight: 94 % of
  // them with up to 4 ranks, and half with 9, the worst case. All ranks agree on the size, since
  // either all have ranks on other hosts or none has.
  const std::size_t room =
      std::clamp(wanted_bytes / static_cast<std::size_t>(size_), least_room, most_room);
  room_ = (here == size_ ? room : std::min(room, most_message - label_bytes)) / 64 * 64;
  depth_ = least_depth * std::max<std::uint64_t>(1, room / room_);
  const std::size_t head = sizeof(Control) + 64 * static_cast<std::size_t>(here);
  mapped_bytes_ = head + depth_ * box_bytes();
  // Keeps the names of several communicators in one process apart.
  static std::atomic<int> made = 0;
  using Name = std::array<char, 64>;
  Name name{};
  fmt::format_to_n(name.data(), name.size() - 1, "/weft-{}-{}", getpid(), made++);
  std::byte* base = map(name.data(), true);
  const auto counter = [&](std::byte* from, int at) {
    return reinterpret_cast<std::atomic<std::uint64_t>*>(from + sizeof(Control) +
                                                         64 * static_cast<std::size_t>(at));
  };
  if (base != nullptr) {
    control_ = new (base) Control;
    for (int k = 0; k < here; ++k) new (counter(base, k)) std::atomic<std::uint64_t>(0);
    boxes_ = base + head;
  }
  std::vector<Name> names(ranks.size());
  MPI_CHECK(MPI_Allgather(name.data(), static_cast<int>(name.size()), MPI_CHAR, names.data(),
                          static_cast<int>(name.size()), MPI_CHAR, node));
  bool whole = base != nullptr;
  for (int k = 0; k < here && whole; ++k) {
    if (k == place) continue;
    std::byte* theirs = map(names[k].data(), false);
    whole = theirs != nullptr;
    if (!whole) break;
    Peer& p = peers_[ranks[k]];
    p.control = reinterpret_cast<Control*>(theirs);
    p.boxes = theirs + head;
    p.read_by_me = counter(base, k);
    p.read_by_them = counter(theirs, place);
  }
  int mine = whole, all = 0;
  MPI_CHECK(MPI_Allreduce(&mine, &all, 1, MPI_INT, MPI_MIN, node));
  // After the all-reduce every rank has mapped the memory, or failed: the name is no longer needed.
  shm_unlink(name.data());
  MPI_CHECK(MPI_Comm_free(&node));
  WEFT_CHECK(all != 0, Exit::hardware,
             "make room in /dev/shm (a container: a larger --shm-size, and --ipc=host where ranks "
             "of one host are in several)",
             "no {:.1f} MiB of shared memory a rank for the messages between ranks of this host",
             static_cast<double>(mapped_bytes_) / (1 << 20));
}

// Null on failure.
std::byte* Mailboxes::map(const char* name, bool fresh) {
  const int file = shm_open(name, fresh ? O_RDWR | O_CREAT | O_EXCL : O_RDWR, S_IRUSR | S_IWUSR);
  if (file < 0) return nullptr;
  void* p = MAP_FAILED;
  // Reserve the space now: if /dev/shm ran full later, a write to the map would raise a signal.
  if (!fresh || posix_fallocate(file, 0, static_cast<off_t>(mapped_bytes_)) == 0)
    p = mmap(nullptr, mapped_bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  ::close(file);
  if (p == MAP_FAILED) return nullptr;
  maps_.push_back(p);
  return static_cast<std::byte*>(p);
}

void Mailboxes::close(bool orderly) {
  if (orderly && messages_) {
    // All operations are complete here, so little remains to be sent; but a message to a failed
    // rank never completes.
    int done = 0;
    for (int k = 0; k < longest_close_ms && !done; ++k) {
      done = 1;
      for (auto& of_box : sends_) {
        int sent = 0;
        MPI_Testall(static_cast<int>(of_box.size()), of_box.data(), &sent, MPI_STATUSES_IGNORE);
        if (sent) of_box.clear();
        done = done && sent;
      }
      if (!done) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    for (Peer& p : peers_)
      for (MPI_Request& request : p.requests) {
        if (request == MPI_REQUEST_NULL) continue;
        MPI_Cancel(&request);
        MPI_Wait(&request, MPI_STATUS_IGNORE);
      }
    orderly = done != 0;
  }
  // MPI still uses the boxes of messages that were neither sent nor cancelled: leave them mapped.
  if (orderly || !messages_)
    for (void* p : maps_) munmap(p, mapped_bytes_);
  else
    static_cast<void>(new std::vector<Peer>(std::move(peers_)));
}

bool Mailboxes::vacant() {
  if (posted_ < depth_) return true;
  for (Peer& p : peers_)
    if (p.control != nullptr && p.read_by_them->load(std::memory_order_acquire) + depth_ <= posted_)
      return false;
  auto& sends = sends_[posted_ % depth_];
  if (sends.empty()) return true;
  int done = 0;
  MPI_CHECK(MPI_Testall(static_cast<int>(sends.size()), sends.data(), &done, MPI_STATUSES_IGNORE));
  if (done) sends.clear();
  return done != 0;
}

void Mailboxes::post(std::size_t bytes_all, const std::vector<std::size_t>& bytes_each) {
  if (messages_) {
    auto& sends = sends_[posted_ % depth_];
    for (int k = 1; k < size_; ++k) {
      const int peer = (rank_ + k) % size_;  // not all ranks to the same one at once
      const auto at = static_cast<std::size_t>(peer);
      if (peers_[at].control != nullptr) continue;
      MPI_CHECK(MPI_Isend(own_box(), static_cast<int>(label_bytes + bytes_all), MPI_BYTE, peer,
                          tag_all, comm_, &sends.emplace_back()));
      MPI_CHECK(MPI_Isend(for_rank(peer), static_cast<int>(bytes_each.empty() ? 0 : bytes_each[at]),
                          MPI_BYTE, peer, tag_each, comm_, &sends.emplace_back()));
    }
  }
  // Release order: a rank that sees the new count also sees the contents of the box.
  control_->posted.store(++posted_, std::memory_order_release);
  for (Peer& p : peers_)
    if (p.control != nullptr) ring(*p.control, 1);
}

void Mailboxes::receive(int peer, std::uint64_t number) {
  Peer& p = peers_[peer];
  const std::uint64_t at = number % depth_;
  std::byte* to = p.inbox.data() + inbox_bytes() * at;
  MPI_CHECK(MPI_Irecv(to, static_cast<int>(label_bytes + room_), MPI_BYTE, peer, tag_all, comm_,
                      &p.requests[2 * at]));
  MPI_CHECK(MPI_Irecv(to + label_bytes + room_, static_cast<int>(room_), MPI_BYTE, peer, tag_each,
                      comm_, &p.requests[2 * at + 1]));
}

bool Mailboxes::arrived(int peer) {
  Peer& p = peers_[peer];
  if (p.control != nullptr) return p.control->posted.load(std::memory_order_acquire) > p.taken;
  int done = 0;
  MPI_CHECK(MPI_Testall(2, &p.requests[2 * (p.taken % depth_)], &done, MPI_STATUSES_IGNORE));
  return done != 0;
}

const std::byte* Mailboxes::box_of(const Peer& p) const {
  return p.control != nullptr ? p.boxes + box_bytes() * (p.taken % depth_)
                              : p.inbox.data() + inbox_bytes() * (p.taken % depth_);
}
const BoxLabel& Mailboxes::label(int peer) const {
  return *reinterpret_cast<const BoxLabel*>(box_of(peers_[peer]));
}
const std::byte* Mailboxes::from_all(int peer) const { return box_of(peers_[peer]) + label_bytes; }
const std::byte* Mailboxes::from_rank(int peer) const {
  const Peer& p = peers_[peer];
  const auto at = static_cast<std::size_t>(p.control != nullptr ? rank_ + 1 : 1);
  return box_of(p) + label_bytes + room_ * at;
}

void Mailboxes::release(int peer) {
  Peer& p = peers_[peer];
  const std::uint64_t number = p.taken++;
  if (p.control == nullptr) {
    receive(peer, number + depth_);
    return;
  }
  p.read_by_me->store(p.taken, std::memory_order_release);
  ring(*p.control, 2);
}

// Avoids a lost wake-up: the ringer increments the bell before it reads `asleep`, and the sleeper
// sets `asleep` before the kernel compares the bell. At least one of them sees the other.
void Mailboxes::ring(Control& control, std::uint32_t wakes) {
  control.bell.fetch_add(1);
  if (control.asleep.load() >= wakes) futex(control.bell, FUTEX_WAKE, 1, nullptr);
}

std::uint32_t Mailboxes::mark() const { return control_->bell.load(); }

bool Mailboxes::wait(std::uint32_t mark, bool for_vacancy) {
  if (stop_) return false;
  if (messages_) {
    // MPI cannot wake this thread, so it polls: short pauses cost little latency, growing ones no
    // processor time.
    std::this_thread::sleep_for(pause_);
    pause_ = std::min(pause_ * 2, std::chrono::microseconds(200));
    return !stop_;
  }
  control_->asleep.store(for_vacancy ? 2 : 1);
  const timespec longest{0, longest_sleep_ns};
  futex(control_->bell, FUTEX_WAIT, mark, &longest);
  control_->asleep.store(0);
  return !stop_;
}

void Mailboxes::interrupt() { ring(*control_, 1); }

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
      each_[r] = static_cast<std::size_t>(where.size()) * size_of(o.comm_dtype);
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
      p.end += counts[k];
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
          each_[r] = count_bytes + static_cast<std::size_t>(where.size()) * size_of(o.comm_dtype);
        }
        boxes_.post(0, each_);
        return true;
      },
      [&](std::int64_t k) {
        for (int r = 0; r < size_; ++r) {
          if (r == rank_ || k >= rounds_[r]) continue;
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
  rounds_.assign(size_, rounds);
  each_.assign(size_, 0);
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
        if (r != rank_ && taken < rounds_[r]) boxes_.release(r);
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
    auto& rounds = rounds_[r];
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
  terms_.resize(size_);
  for (std::int64_t first = 0; first < where.size(); first += sum_block) {
    const std::int64_t count = std::min(sum_block, where.size() - first);
    for (int r = 0; r < size_; ++r)
      terms_[r] = r == rank_ ? own + first * width : term_of(r) + first * comm_dtype;
    if (o.comm_dtype != o.to.dtype()) {
      ops::convert_range(own + first * width, o.to.dtype(), rounded_.data(), o.comm_dtype, count);
      terms_[rank_] = rounded_.data();
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
