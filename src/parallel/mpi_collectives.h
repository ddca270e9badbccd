// The MPI communicator's collectives as messages between every two ranks. Every collective is one
// exchange, or two, in which each rank sends a part of a tensor to each other rank, and either
// puts what it gets in its place or adds it up in the order of ranks.
//
// Why not MPI's own non-blocking collectives:
//   order  MPI_Ireduce_scatter may add in any order, so sums would have to be made here all the
//          same, from an all-to-all of terms;
//   hangs  a request of theirs cannot be abandoned, and ranks in different collectives wait for
//          each other in silence or take each other's bytes; the label ahead of the first message
//          tells at once.
#pragma once

#include <mpi.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/parts.h"
#include "parallel/watchdog.h"
#include "tensor/tensor.h"

namespace weft {

// One operation as the caller requested it. It holds its tensors until it is done, also while an
// error unwinds the caller.
struct MpiOperation {
  CollectiveKind kind = CollectiveKind::all_reduce;
  DType comm_dtype = DType::f32;  // type that is sent
  Tensor to = {}, from = {};      // from: for an all-to-all only; others work in place
  std::vector<std::int64_t> to_counts = {}, from_counts = {};
  // When the compute stream has come to where the operation was issued; device tensors only.
  DeviceEvent written = {};

  Collective record() const;
};

// Calls come from one thread at a time. Memory is bounded: four pieces for each other rank.
class MpiCollectives {
 public:
  // `stop` turning true ends every wait.
  MpiCollectives(MPI_Comm comm, const std::atomic<bool>& stop);
  ~MpiCollectives();
  MpiCollectives(const MpiCollectives&) = delete;
  MpiCollectives& operator=(const MpiCollectives&) = delete;

  // Waits until device tensors are written. False: stopped.
  bool ready(const MpiOperation& o) const { return reached(o.written); }
  // Runs operation `number` to its end. `awaited`: the calling thread has nothing else to do, and
  // waits without sleeping for a while. False: stopped. Throws OtherCollective, and Exit::hang if
  // two ranks disagree about the size that one sends the other in an all-to-all.
  bool run(std::uint64_t number, const MpiOperation& o, bool awaited);

 private:
  // Ahead of a rank's first message of an operation.
  struct Label {
    std::uint64_t number = 0;  // from 1
    Collective what;
    std::int64_t elements = 0;  // of an all-to-all: what the receiver gets
  };
  using Parts = std::vector<Part>;  // one for each rank
  enum class Taking { place, add };
  // What is under way of one round of an exchange.
  struct Round {
    std::vector<MPI_Request> requests;
    std::vector<std::byte> out, in;  // a piece for each rank
  };

  void send_labels(std::uint64_t number, const MpiOperation& o);
  bool compare_labels(const MpiOperation& o);
  bool exchange(const MpiOperation& o, const Tensor& from, const Parts& out, const Parts& in,
                Taking taking);
  bool start(Round& round, const MpiOperation& o, const Tensor& from, const Parts& out,
             const Parts& in, Taking taking, std::int64_t k);
  bool take(Round& round, const MpiOperation& o, const Parts& in, Taking taking, std::int64_t k);
  bool add(Round& round, const MpiOperation& o, Part where);
  bool copy_own(const MpiOperation& o, Part from, Part to);
  bool finish(std::vector<MPI_Request>& requests, bool all_are_here);

  // Host access to tensors: host memory directly, GPU memory through pinned memory.
  const std::byte* read(const Tensor& t, Part where);  // until the next call; null: stopped
  bool write(const Tensor& t, Part where, const std::byte* from, DType type);
  bool reached(const DeviceEvent& event) const;

  MPI_Comm comm_;
  const std::atomic<bool>& stop_;
  int rank_ = 0, size_ = 1;
  std::size_t piece_bytes_ = 0;
  bool awaited_ = false;
  bool compared_ = false;  // this operation's labels
  std::vector<Label> labels_out_, labels_in_;
  std::vector<MPI_Request> label_requests_;
  std::array<Round, 2> rounds_;
  std::vector<const void*> terms_;
  std::vector<std::byte> rounded_;  // this rank's own term, rounded as if sent
  void* pinned_ = nullptr;          // made when first used
};

// Thrown if another rank is in a collective of another kind or size.
class OtherCollective : public Error {
 public:
  using Error::Error;
};

}  // namespace weft
