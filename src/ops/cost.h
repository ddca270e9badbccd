// What an operation costs, from its name and its tensors' shapes alone: for dry runs
// (train/step_cost.h) and profiles (ops/dispatch.h).
#pragma once

#include <span>
#include <string_view>

#include "tensor/tensor.h"

namespace weft::ops {

// The least number of floating-point operations of one call as the plain sum has them: a product
// 2 M N K, a convolution 2 numel(y) Cin kt kh kw, an upsampled one 4/9 of that (ops/conv.h),
// attention of P positions to P others with C channels 4 P P C forward and 2.5 times that backward.
// 0 for operations that memory bounds. Packed sequences, whose lengths are not in the shapes, count
// as if all were of the mean length. `tensors`: the call's, in their order, undefined ones too.
double operations_of(std::string_view name, std::span<const Tensor> tensors);

// The bytes that one call has to move: those of its tensors, each once; of an operation that reads
// or writes only part of one, that part; of the optimizer's, which reads and writes its state,
// twice.
double bytes_of(std::string_view name, std::span<const Tensor> tensors);

}  // namespace weft::ops
