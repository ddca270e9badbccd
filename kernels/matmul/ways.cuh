// Choice between ways of computing the same thing, by measurement (ways.cu).
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "ops/ways.h"
#include "tensor/device.h"
#include "tensor/tensor.h"

namespace weft::kernels {

// What an operation writes. Some may be undefined: not wanted.
using Outputs = std::vector<Tensor>;
// Enqueues the work in a way, into `to`, tensors like the outputs; false where it cannot be done.
using RunWay = std::function<bool(int way, const Outputs& to)>;

// False where the first way is taken unmeasured: without a table, or where so few multiplications
// are not worth it. Callers then need no key.
bool has_choice(std::int64_t multiplications);

// Which of `ways` to take for the work that `key` names (no tabs); the first ones are those that
// GPUs have been seen to do right. Measured on the compute stream, outside of captures, into memory
// of its own. A way whose results differ from the first's by more than `tolerance`, as a share of
// their root mean square, is not taken, and a WARN names it.
int choose(const std::string& key, const std::vector<std::string>& ways, const Outputs& outputs,
           double tolerance, const RunWay& run);

// Does the work in the way that choose() names, or where that cannot be done in number `fallback`:
// run(way, outputs), with that very object.
void run_best(const std::string& key, const std::vector<std::string>& ways, const Outputs& outputs,
              double tolerance, const RunWay& run, int fallback = 0);

// Whether device.try names this one of untested_ways.
bool is_tried(std::string_view way);

// Counts the calls of set_ways: what was chosen before is to be chosen again.
int ways_generation();

// True while the compute stream records a graph instead of running.
bool compute_is_capturing();

// The tolerance of results that are rounded once to this type, from the same operands, which may be
// rounded to TF32 before.
inline double tolerance_of(DType operands) {
  return operands == DType::bf16 ? 6e-3 : tf32_allowed() ? 2e-3 : 1e-4;
}

}  // namespace weft::kernels
