// `weft bench t5 DECK`: the layers of a T5 encoder on random weights, timed; validation/compare_t5.py sets it beside PyTorch.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "config/command.h"

namespace weft {

struct BenchT5Request {
  std::vector<std::int64_t> lengths = {300};  // of the captions, in tokens
  std::int64_t rounds = 5;
  std::int64_t warmup = 1;
  bool paced = false;  // before each round, wait for a line on stdin
};

// Prints the seconds of each round, a line each: one pass of all captions together through all layers of t5.num_layers.
int bench_t5(const Deck& deck, const BenchT5Request& request);
Command bench_t5_command();

}  // namespace weft
