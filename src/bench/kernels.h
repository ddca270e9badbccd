// `weft bench kernels`: every operation on this rank's device, checked against the CPU side, then timed against the ceiling.
#pragma once

#include <string>

#include "config/command.h"

namespace weft {

struct BenchKernelsRequest {
  std::string size = "real";  // small or real
  std::string filter;         // part of the operation's name
  std::string device = "auto";
  std::string json;         // file for the results
  bool check_only = false;  // for compute-sanitizer and tests
};

// Prints a line a case with time, GB/s or TFLOP/s, share of the ceiling measured in the same run and the number of wrong
// elements. Exit::internal if any is wrong.
int bench_kernels(const BenchKernelsRequest& request);
Command bench_kernels_command();

}  // namespace weft
