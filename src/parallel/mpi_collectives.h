// The MPI communicator's collectives (class MpiCollectives) and below them its data exchange (class
// Mailboxes): boxes that each rank fills and all others read, in order. Ranks on one host read each
// other's boxes in shared memory, with one copy in and one out, and wake each other when they
// sleep; boxes go to the ranks of other hosts as messages.
//
// Why not MPI's own non-blocking collectives, driven by the progress thread:
//   order  MPI_Ireduce_scatter may add in any order, so sums would have to be made here all the
//          same, from an all-to-all of pieces;
//   sleep  they advance only inside MPI_Test, which would have to be called again and again on a
//          core that computes; a futex sleeps until the other rank has posted;
//   hangs  a request cannot be cancelled, and ranks in different collectives wait for each other in
//          silence; the label at the head of a box tells at once.
// Why shared memory within a host: the same boxes sent as messages make steps 1 to 13 % longer
// (validation/results/cpu.md, Messages between ranks of one host).
#pragma once

#include <mpi.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "core/error.h"
#include "core/parts.h"
#include "parallel/watchdog.h"
#include "tensor/tensor.h"

namespace weft {

// At the head of every box: the operation that its writer is in.
struct BoxLabel {
  std::uint64_t number = 0;  // of the collective, from 1
  std::uint32_t kind = 0, dtype = 0;
  std::uint64_t bytes = 0;   // of the whole collective
  std::uint64_t rounds = 0;  // boxes that the writer fills for it
};

// Calls come from one thread at a time, except interrupt(). Memory is bounded: depth() boxes for
// this rank, and as many for each rank on another host.
class Mailboxes {
 public:
  // Collective. `stop` turning true (and interrupt()) ends every wait.
  Mailboxes(MPI_Comm comm, const std::atomic<bool>& stop);
  // Ends this rank's use; `orderly` means that all operations are done. No other call may follow.
  void close(bool orderly);

  // A box holds `room()` bytes for all ranks, and as many for each.
  std::size_t room() const { return room_; }
  // Boxes of a rank that may be in flight at once.
  std::int64_t depth() const { return static_cast<std::int64_t>(depth_); }
  // Whether some rank is on another host: a thread that waits then looks again and again instead of
  // sleeping until it is woken.
  bool messages() const { return messages_; }

  // This rank's next box: whether it may be filled, its addresses (64-byte aligned), and its
  // sending.
  bool vacant();
  BoxLabel& label() { return *reinterpret_cast<BoxLabel*>(own_box()); }
  std::byte* for_all() { return own_box() + label_bytes; }
  std::byte* for_rank(int peer) { return for_all() + room_ * static_cast<std::size_t>(peer + 1); }
  // bytes_each: what for_rank() holds for each rank; empty: nothing.
  void post(std::size_t bytes_all, const std::vector<std::size_t>& bytes_each);

  // The oldest box of `peer` not yet released: whether it has arrived, and its addresses. Not for
  // this rank itself.
  bool arrived(int peer);
  const BoxLabel& label(int peer) const;
  const std::byte* from_all(int peer) const;
  const std::byte* from_rank(int peer) const;
  void release(int peer);

  // Read the mark, look for work, and if there is none, wait from that mark on. False: stop.
  std::uint32_t mark() const;
  bool wait(std::uint32_t mark, bool for_vacancy);
  void moved() { pause_ = std::chrono::microseconds(5); }  // work was found
  void interrupt();                                        // from any thread

 private:
  static constexpr std::size_t label_bytes = 64;

  // One per rank, at the head of its shared memory.
  struct alignas(64) Control {
    std::atomic<std::uint64_t> posted = 0;
    alignas(64) std::atomic<std::uint32_t> bell = 0;  // counts; the word to sleep on
    std::atomic<std::uint32_t> asleep = 0;  // 1: for a box of another rank, 2: also for a vacancy
    // Followed by one counter per rank of the host, one a cache line: its boxes that this rank has
    // finished with.
  };
  struct Peer {
    Control* control = nullptr;  // of a rank of this host
    std::byte* boxes = nullptr;
    std::atomic<std::uint64_t>* read_by_me = nullptr;
    std::atomic<std::uint64_t>* read_by_them = nullptr;
    std::uint64_t taken = 0;  // boxes released
    // For a rank on another host: receives of the next boxes, two messages each.
    std::vector<MPI_Request> requests = {};
    std::vector<std::byte> inbox = {};
  };

  std::size_t box_bytes() const {
    return label_bytes + room_ * static_cast<std::size_t>(size_ + 1);
  }
  std::size_t inbox_bytes() const { return label_bytes + 2 * room_; }
  std::byte* own_box() { return boxes_ + box_bytes() * (posted_ % depth_); }
  const std::byte* box_of(const Peer& p) const;
  void open_window();
  std::byte* map(const char* name, bool fresh);
  void receive(int peer, std::uint64_t number);
  static void ring(Control& control, std::uint32_t wakes);

  MPI_Comm comm_;
  const std::atomic<bool>& stop_;
  int rank_ = 0, size_ = 1;
  std::size_t room_ = 0;
  std::uint64_t depth_ = 0;
  std::vector<void*> maps_;  // shared memory of the ranks of this host
  std::size_t mapped_bytes_ = 0;
  std::vector<Peer> peers_;  // of all ranks, this one's own unused
  Control* control_ = nullptr;
  std::byte* boxes_ = nullptr;
  std::uint64_t posted_ = 0;
  std::vector<std::vector<MPI_Request>> sends_;  // for each of this rank's boxes
  bool messages_ = false;                        // some rank is on another host
  std::chrono::microseconds pause_{5};
};

// The collectives of the MPI communicator: who puts what into which box. The rank
// that owns a part sums it, in the order of ranks, so that the bits do not depend on the order in
// which boxes arrive.

// Host access to an operation's tensors, one piece at a time: host memory directly, GPU memory
// through pinned memory.
class MpiMemory {
 public:
  // Pieces have at most `piece_bytes`; `stop` ends waits for the GPU.
  MpiMemory(std::size_t piece_bytes, const std::atomic<bool>& stop)
      : piece_bytes_(piece_bytes), stop_(stop) {}
  ~MpiMemory();
  MpiMemory(const MpiMemory&) = delete;
  MpiMemory& operator=(const MpiMemory&) = delete;

  // Elements [first, first + count) of `t` to read, until the next call of read(). Null: stopped.
  const std::byte* read(const Tensor& t, std::int64_t first, std::int64_t count);
  // The address to write elements [first, ...) of `t` to, and the call that ends the writing. Null:
  // stopped.
  std::byte* write(const Tensor& t, std::int64_t first);
  void written(const Tensor& t, std::int64_t first, std::int64_t count);
  // Waits until all written pieces have reached their tensors. False: stopped.
  bool flush();
  // Waits for an event of the GPU, with pauses. False: stopped.
  bool reached(const DeviceEvent& event) const;

 private:
  static std::byte* at(const Tensor& t, std::int64_t first) {
    return static_cast<std::byte*>(t.raw()) + first * static_cast<std::int64_t>(size_of(t.dtype()));
  }
  struct Stage {
    void* memory = nullptr;  // pinned, made when first used
    DeviceEvent free;        // the GPU has finished with it
  };
  std::byte* of(Stage& s);

  std::size_t piece_bytes_;
  const std::atomic<bool>& stop_;
  Stage in_;
  std::array<Stage, 2> out_;  // one is filled while the other is copied
  std::size_t turn_ = 0;
};

enum class CollectiveKind : std::uint32_t { all_reduce, reduce_scatter, all_gather, all_to_all };

// One operation as the caller requested it. It holds its tensors until it is done, also while an
// error unwinds the caller.
struct MpiOperation {
  CollectiveKind kind = CollectiveKind::all_reduce;
  DType comm_dtype = DType::f32;  // type that is sent
  Tensor to = {}, from = {};      // from: for an all-to-all only; others work in place
  std::vector<std::int64_t> to_counts = {}, from_counts = {};
  // When the compute stream has come to where the operation was issued; device tensors only.
  DeviceEvent written = {};

  Watchdog::Collective record() const;
};

// Thrown if another rank is in a collective of another kind or size. The watchdogs' records tell
// which ranks differ.
class OtherCollective : public Error {
 public:
  using Error::Error;
};

class MpiCollectives {
 public:
  // Collective, as close(): Mailboxes.
  MpiCollectives(MPI_Comm comm, const std::atomic<bool>& stop);
  void close(bool orderly) { boxes_.close(orderly); }
  void interrupt() { boxes_.interrupt(); }
  bool messages() const { return boxes_.messages(); }
  // Waits until device tensors are written. False: stopped.
  bool ready(const MpiOperation& o) const { return memory_.reached(o.written); }

  // Runs operation `number` to its end, on one thread at a time. False: stopped. Throws
  // OtherCollective, and Exit::hang if two ranks disagree about the size that one sends the other
  // in an all-to-all.
  bool run(std::uint64_t number, const MpiOperation& o);

 private:
  // Fills box `round` of this rank, or takes that box of all other ranks. False: stopped.
  using Step = std::function<bool(std::int64_t round)>;

  bool reduce(const MpiOperation& o);
  bool reduce_small(const MpiOperation& o);
  bool gather(const MpiOperation& o);
  bool exchange(const MpiOperation& o);
  bool run_rounds(std::int64_t rounds, std::int64_t ahead, const Step& fill, const Step& take);
  bool all_here(std::int64_t round);
  void compare(int peer) const;
  bool pack(const MpiOperation& o, const Tensor& t, Part where, std::byte* to);
  bool unpack(const MpiOperation& o, Part where, const std::byte* from);
  template <class TermOf>
  bool add(const MpiOperation& o, Part where, bool rounded, TermOf&& term_of);

  int rank_ = 0, size_ = 1;
  const std::atomic<bool>& stop_;
  Mailboxes boxes_;
  MpiMemory memory_;
  BoxLabel label_;                    // of the operation in progress
  std::vector<std::int64_t> rounds_;  // per rank, known once its first box has arrived
  std::vector<std::size_t> each_;     // bytes for each rank in the box being filled
  std::vector<const void*> terms_;
  std::vector<std::byte> rounded_;  // this rank's own term, rounded as if sent
};

}  // namespace weft
