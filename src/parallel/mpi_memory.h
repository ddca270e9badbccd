// Host access to the tensors of an operation, a piece at a time: directly to memory of the host, by way of pinned memory to
// that of a GPU.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "tensor/tensor.h"

namespace weft {

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
  // The place where elements [first, ...) of `t` are to be written, and the end of their writing. Null: stopped.
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

}  // namespace weft
