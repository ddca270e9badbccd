// `weft bench step`: the time of a training step (forward, backward, AdamW) on given weights and inputs.
#pragma once

#include <string>

#include "core/deck.h"

namespace weft {

struct BenchStepRequest {
  std::string weights, inputs;  // safetensors; inputs as of `weft probe loss` (docs/probe.md)
  std::string outputs;          // weights after all steps, "" = not wanted
  std::string json;             // results, "" = stdout table only
  int steps = 4, warmup = 2;
  bool profile = false;  // also time every operation
};

int bench_step(const Deck& deck, const BenchStepRequest& request);

}  // namespace weft
