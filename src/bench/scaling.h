// `weft bench scaling`: the same training on 1, 2, ... ranks within one job, checked and timed.
#pragma once

#include <mpi.h>

#include <string>
#include <vector>

#include "config/command.h"

namespace weft {

struct BenchScalingRequest {
  std::vector<int> ranks;  // rank counts; empty: 1, 2, 4, ... and all
  std::string mode =
      "weak";  // weak: train.micro_batches a rank; strong: train.micro_batches over all ranks
  std::string mix = "mixed";  // mixed: the deck's buckets; uniform: the largest of them alone
  int steps = 6, rounds = 3;  // timed steps a round at the greatest rank count
  int warmup = 3;             // and before: memory is touched, caches fill
  bool no_overlap = false;    // measure also parallel.overlap = false
  bool paced = false;  // wait for a line on stdin before each round: others are measured in turn
  std::string json, plot;  // files, "" = not wanted
};

// Collective. Checks first that all rank counts compute the same (losses and weights of a few steps on the same samples agree
// within what reordered sums explain; Exit::hardware if not), then times them in turn, round by round. Of a round every rank
// count trains on the same samples (weak: fewer ranks take more steps). Ranks that a count leaves out sleep. On CPUs it also
// runs as many trainings side by side that have nothing to do with each other: what the machine itself gives.
int bench_scaling(const Deck& deck, const BenchScalingRequest& request, MPI_Comm world);
Command bench_scaling_command();

}  // namespace weft
