// `weft bench step`: the time of a training step (forward, backward, AdamW) on given weights and inputs.
#pragma once

#include <string>

#include "config/command.h"

namespace weft {

struct BenchStepRequest {
  // Safetensors; inputs as of `weft probe loss` (docs/probe.md). Without them fresh weights, and noise of this latent shape.
  std::string weights, inputs;
  std::string shape = "1x15x32x32";  // clips x latent frames x height x width
  std::int64_t captions = 300;       // caption rows a clip
  std::string outputs;               // weights after all steps, "" = not wanted
  std::string json;                  // results, "" = stdout table only
  int steps = 4, warmup = 2;
  bool profile = false;  // also time every operation
};

// Prints the median step, and operations a second: 3 x the forward's (recomputation is not counted), and their share of a plain
// matrix product's in the same run. On a GPU a small step of the same model is first checked against the CPU side.
int bench_step(const Deck& deck, const BenchStepRequest& request);
Command bench_step_command();

}  // namespace weft
