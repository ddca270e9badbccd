// A rank's place in the chain of ranks that hold the text encoder's layers: activations of one
// micro-batch come in while those of another are worked on. Host memory on both sides; messages go
// on while the rank computes.
#pragma once

#include <mpi.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <span>
#include <thread>
#include <vector>

namespace weft {

// Keeps MPI at work on messages while this rank is not in MPI. Needs MPI_THREAD_MULTIPLE; without,
// it does nothing.
class MessageProgress {
 public:
  explicit MessageProgress(MPI_Comm comm);
  ~MessageProgress();
  MessageProgress(const MessageProgress&) = delete;
  MessageProgress& operator=(const MessageProgress&) = delete;

 private:
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

// One direction between two ranks: messages of whole rows, in order, two under way at most. Either
// all of them come, or a message without rows ends them early.
class RowStream {
 public:
  // rows[i]: rows of message i, each of row_bytes. `peer` sends or receives them under `tag`.
  RowStream(MPI_Comm comm, int peer, int tag, std::vector<std::int64_t> rows,
            std::size_t row_bytes);
  ~RowStream();
  RowStream(const RowStream&) = delete;
  RowStream& operator=(const RowStream&) = delete;

  // Sending: a buffer for the next message, once its last one has left; then off with it.
  std::span<std::byte> next_buffer(const std::function<void()>& meanwhile);
  void send();
  // There will be no more.
  void send_end(const std::function<void()>& meanwhile);

  // Receiving: begins to take the next message; whether the oldest has come; waits for it: empty if
  // it is the end. The buffer is good until two more have been begun.
  void begin();
  bool has_come();
  std::span<const std::byte> take(const std::function<void()>& meanwhile);

  bool done() const { return taken_ == rows_.size() || ended_; }
  // Until everything sent has left.
  void drain(const std::function<void()>& meanwhile);

  // Memory of the two buffers.
  static std::size_t bytes(std::int64_t most_rows, std::size_t row_bytes) {
    return 2 * static_cast<std::size_t>(most_rows) * row_bytes;
  }

 private:
  bool test(std::size_t slot);
  void wait(std::size_t slot, const std::function<void()>& meanwhile);
  std::span<std::byte> buffer(std::size_t i);

  MPI_Comm comm_;
  int peer_, tag_;
  std::vector<std::int64_t> rows_;
  std::size_t row_bytes_;
  MPI_Datatype row_;
  std::array<std::vector<std::byte>, 2> buffers_;
  std::array<MPI_Request, 2> requests_{MPI_REQUEST_NULL, MPI_REQUEST_NULL};
  std::array<int, 2> came_{};          // rows
  std::size_t begun_ = 0, taken_ = 0;  // messages
  bool ended_ = false;
};

}  // namespace weft
