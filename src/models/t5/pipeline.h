// A rank's place in the chain of ranks that hold the text encoder's layers: it receives the
// activations of one micro-batch while it computes another. Host memory on both sides; messages
// progress while the rank computes.
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

// Lets MPI progress messages while this rank is computing. Needs MPI_THREAD_MULTIPLE; does nothing
// without it.
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

// One direction between two ranks: messages of whole rows, in order, at most two in flight. Either
// all of them arrive, or a message without rows ends the stream early.
class RowStream {
 public:
  // rows[i]: rows of message i, each of row_bytes. `peer` sends or receives them under `tag`.
  RowStream(MPI_Comm comm, int peer, int tag, std::vector<std::int64_t> rows,
            std::size_t row_bytes);
  ~RowStream();
  RowStream(const RowStream&) = delete;
  RowStream& operator=(const RowStream&) = delete;

  // Sending: next_buffer() returns a buffer once its previous message has left; send() sends it.
  std::span<std::byte> next_buffer(const std::function<void()>& meanwhile);
  void send();
  // Ends the stream early.
  void send_end(const std::function<void()>& meanwhile);

  // Receiving: begin() posts the receive of the next message; has_come() tells whether the oldest
  // has arrived; take() waits for it and is empty at the end. A buffer is valid until two more
  // receives have begun.
  void begin();
  bool has_come();
  std::span<const std::byte> take(const std::function<void()>& meanwhile);

  bool done() const { return taken_ == rows_.size() || ended_; }
  // Waits until everything sent has left.
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
