// The collectives of the MPI communicator: who puts what into which box (mpi_mailbox.h). The rank
// that owns a part sums it, in the order of ranks, so that the bits do not depend on the order in
// which boxes arrive.
#pragma once

#include <mpi.h>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "core/error.h"
#include "core/parts.h"
#include "parallel/mpi_mailbox.h"
#include "parallel/watchdog.h"
#include "tensor/tensor.h"

namespace weft {

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
  DeviceEvent written =
      {};  // of device tensors: the compute stream has come to where it was issued

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
  // Waits until device tensors are written. False: stopped.
  bool ready(const MpiOperation& o) const { return memory_.reached(o.written); }

  // Runs operation `number` to its end. False: stopped. Throws OtherCollective, and Exit::hang if
  // two ranks disagree about the size that one sends the other in an all-to-all.
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
