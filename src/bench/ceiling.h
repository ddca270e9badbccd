// What this rank's device reaches at best, measured: the yardstick of weft bench.
#pragma once

#include <functional>

#include "tensor/dtype.h"

namespace weft {

// Median seconds of one call of `f` over five rounds, from the device's events (host clock on the
// CPU).
double seconds_of(const std::function<void()>& f);

// Operations a second of a large matrix product, and bytes a second of a plain copy far larger than
// any cache. Both take memory from the current arena, up to 0.8 GB and 0.6 GB.
double product_rate(DType dtype);
double copy_rate();

}  // namespace weft
