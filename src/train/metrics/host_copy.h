// What a step computed, brought to the host without a wait: pinned memory on a GPU.
#pragma once

#include <memory>
#include <span>

#include "tensor/tensor.h"

namespace weft {

class HostCopy {
 public:
  explicit HostCopy(std::int64_t count);  // f64 values

  // Copies `t`, f64 [count]: at once on the CPU, behind the compute stream's work on a GPU. The
  // memory is used again two calls later, for a step is evaluated after the next one is issued.
  std::span<const double> fetch(const Tensor& t);

 private:
  std::size_t count_;
  std::unique_ptr<double, void (*)(double*)> memory_;
  bool second_ = false;
};

}  // namespace weft
