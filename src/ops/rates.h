// How fast this rank's device computes, measured: the yardstick of steps and of benchmarks.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "tensor/dtype.h"

namespace weft {

// Median seconds of one call of `f` over five rounds, from the device's events (host clock on the
// CPU).
double seconds_of(const std::function<void()>& f);

// Operations a second of a large matrix product, and bytes a second of a plain copy far larger
// than any cache, in the fastest of 15 rounds: before a GPU's power settles. Both take memory from
// the current arena, up to 0.8 GB and 0.6 GB.
double product_rate(DType dtype);
double copy_rate();

// A product of a layer with weights [outputs, inputs] and so many rows of activations: its output,
// or the gradient of its input or weight. So many calls a step.
struct StepProduct {
  enum class Of { output, input, weight } of;
  std::int64_t rows, outputs, inputs, calls;
  double flops() const {
    return 2.0 * static_cast<double>(rows * outputs) * static_cast<double>(inputs * calls);
  }
};
// Operations a second of these products of standard normals, one behind the other, in the median
// round of so many seconds: what the device keeps up with a step's shapes, power and clocks.
// Memory from the current arena, for the largest operands and results, and 4 bytes an element of an
// operand for a moment.
double product_rate(DType dtype, const std::vector<StepProduct>& products, double seconds);

}  // namespace weft
