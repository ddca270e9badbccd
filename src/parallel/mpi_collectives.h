// The collectives of the MPI side: who puts what into which box (mpi_mailbox.h). Sums are made by
// the one rank that owns a part, in the order of ranks, so that they have the same bits however the
// boxes arrive.
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

// Host access to the tensors of an operation, a piece at a time: directly to memory of the host, by
// way of pinned memory to that of a GPU.
class MpiMemory {
 public:
  // Pieces are of at most `piece_bytes`; `stop` ends waits for the GPU.
  MpiMemory(std::size_t piece_bytes, const std::atomic<bool>& stop)
      : piece_bytes_(piece_bytes), stop_(stop) {}
  ~MpiMemory();
  MpiMemory(const MpiMemory&) = delete;
  MpiMemory& operator=(const MpiMemory&) = delete;

  // Elements [first, first + count) of `t` to read, until the next call of read(). Null: stopped.
  const std::byte* read(const Tensor& t, std::int64_t first, std::int64_t count);
  // The place where elements [first, ...) of `t` are to be written, and the end of their writing.
  // Null: stopped.
  std::byte* write(const Tensor& t, std::int64_t first);
  void written(const Tensor& t, std::int64_t first, std::int64_t count);
  // Waits until all that was written is in its place. False: stopped.
  bool flush();
  // Waits for an event of the GPU, with pauses. False: stopped.
  bool reached(const DeviceEvent& event) const;

 private:
  static std::byte* at(const Tensor& t, std::int64_t first) {
    return static_cast<std::byte*>(t.raw()) + first * static_cast<std::int64_t>(size_of(t.dtype()));
  }
  struct Stage {
    void* memory = nullptr;  // pinned, made when first used
    DeviceEvent free;        // the GPU is done with it
  };
  std::byte* of(Stage& s);

  std::size_t piece_bytes_;
  const std::atomic<bool>& stop_;
  Stage in_;
  std::array<Stage, 2> out_;  // one is filled while the other is on its way
  std::size_t turn_ = 0;
};

enum class CollectiveKind : std::uint32_t { all_reduce, reduce_scatter, all_gather, all_to_all };

// One operation as the caller asked for it. Its tensors are held until it is done, also while an
// error unwinds the caller.
struct MpiOperation {
  CollectiveKind kind = CollectiveKind::all_reduce;
  DType comm_dtype = DType::f32;  // what travels
  Tensor to = {}, from = {};      // from: of an all-to-all alone; the others work in place
  std::vector<std::int64_t> to_counts = {}, from_counts = {};
  DeviceEvent written =
      {};  // of device tensors: the compute stream has come to where it was issued

  Watchdog::Collective record() const;
};

// Another rank is in a collective of another kind or size. The watchdogs' records tell which ranks
// differ.
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

  // Operation `number`, from its start to its end. False: stopped. Throws OtherCollective, and
  // Exit::hang if two ranks differ over what one sends the other in an all-to-all.
  bool run(std::uint64_t number, const MpiOperation& o);

 private:
  // Fills box `round` of this rank, or takes what is in that box of all the others. False: stopped.
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
  BoxLabel label_;                    // of the operation under way
  std::vector<std::int64_t> rounds_;  // of each rank in it, once its first box is here
  std::vector<std::size_t> each_;     // bytes for each rank in the box being filled
  std::vector<const void*> terms_;
  std::vector<std::byte> rounded_;  // this rank's own term as it would have travelled
};

}  // namespace weft
