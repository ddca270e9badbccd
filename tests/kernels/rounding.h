// How well convolutions and products round: the error of every algorithm (ops/conv.h),
// against fp64, compared with plain summation, which adds one fused product after the other in
// f32. weft_kernels --rounding prints the table, test_ops holds small shapes to
// rounding_bound.
#pragma once

#include <compare>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "ops/conv.h"

// The algorithms themselves, of what weft is compiled for: of x86-64 two sides.
#ifdef __x86_64__
namespace weft::ops::cpu_v3 {
#include "ops/cpu/conv/parts.h"
}
namespace weft::ops::cpu_v4 {
#include "ops/cpu/conv/parts.h"
}
#else
namespace weft::ops::cpu_generic {
#include "ops/cpu/conv/parts.h"
}
#endif

namespace weft {

// The largest error of an algorithm may be this many times that of plain summation.
constexpr double rounding_bound = 8;

struct RoundingShape {
  std::string name;
  Shape x;  // [N,T,H,W,Cin]
  std::int64_t out;
  ops::Conv conv;  // not upsampled
};

// Errors as shares of the result's root mean square.
struct RoundingError {
  double largest = 0, rms = 0;
};

struct RoundingRow {
  std::string algorithm;  // "winograd"; "oneDNN" is direct.cpp
  // "v3", "v4" or "generic": what weft is compiled for. oneDNN looks at the processor and at
  // ONEDNN_MAX_CPU_ISA.
  std::string side;
  bool taken;  // what ops/conv.h takes; else the library's, to compare with
  RoundingError error;
  double seconds;
};

struct RoundingCase {
  std::string shape, pass;  // "forward", "input gradient", "weight gradient"
  std::int64_t terms;       // of a sum
  RoundingError plain;
  std::vector<RoundingRow> rows;
};

// All passes and sides of a shape, on the CPU. Inputs are what a ReLU lets through, weights He's,
// gradients normal. Compared at random places, `products` products of each pass.
std::vector<RoundingCase> measure_rounding(const RoundingShape& shape, double products);

// Layers of the models.
std::vector<RoundingShape> rounding_shapes();

}  // namespace weft
