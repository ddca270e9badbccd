// `weft simulate DECK`: the deck's step plan and bucket schedule played on many ranks of a described machine.
#pragma once

#include <string>
#include <vector>

#include "config/command.h"

namespace weft {

struct SimulateRequest {
  std::vector<int> gpus = {1, 2, 4, 8, 16, 32, 64, 128};
  std::vector<std::string> fabrics = {"8x400"}, styles = {"weft"};
  double memory_gb = 141;  // of a GPU: decides what is recomputed
  std::int64_t per_gpu =
      0;  // micro-batches a rank and step; 0: the deck's train.micro_batches, shared by all
  std::string costs,
      rates;      // measured ones (plan/simulation_job.h, train/step_cost.h); empty: predicted
  int cores = 0;  // of the host, for --fabric local; 0: those of this one
  double link_rate = 2;  // GB/s between its ranks, as weft bench comm measures them
  int steps = 20, warmup = 2;
  double variation = 0.01;
  double barrier_tflops = 130;
  std::string json, plot;
};

// Prints a table a fabric and style, writes JSON and SVG as asked. Returns 0; throws Exit::usage for what cannot be done.
int simulate(const Deck& deck, const SimulateRequest& request);
Command simulate_command();

}  // namespace weft
