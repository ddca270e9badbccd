// Brings the clips of a micro-batch to the rank's device. On a GPU two buffers take turns: while the compute stream works on
// one micro-batch, the copy stream fills the other, tied by events; no host waits. On the CPU clips stay where they are.
#pragma once

#include <array>
#include <span>

#include "tensor/tensor.h"

namespace weft {

class ClipStaging {
 public:
  // `bytes` of the largest micro-batch.
  explicit ClipStaging(std::size_t bytes);

  // The clips as u8 on the device. `clips` may be overwritten once consumed() was called, on a GPU at once.
  Tensor stage(std::span<const std::byte> clips);
  // All work on what stage() returned has been issued to the compute stream.
  void consumed();

 private:
  std::array<Tensor, 2> buffers_;
  std::array<DeviceEvent, 2> free_;  // after the last work on each
  std::size_t turn_ = 0;
};

}  // namespace weft
