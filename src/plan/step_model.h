// Closed formulas for the time of a training step around what its micro-batches compute
// (train/step_cost.h): what communication takes, and what of that the computation cannot hide.
// `weft plan` prints them; `weft simulate` plays the same structures message by message. All times
// in seconds.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "config/deck.h"
#include "plan/machine.h"
#include "train/step_cost.h"
#include "train/task.h"

namespace weft {

// Collectives over `ranks` ranks, `ranks_a_node` on each node.
struct CommModel {
  int ranks = 1;
  Machine machine;
  // Hierarchical: inside the nodes and between them at once, pipelined. Flat: one ring (per card)
  // through all ranks, in which every byte leaves each node once.
  bool hierarchical = true;

  int nodes() const;
  double reduce_scatter(double bytes) const;  // of `bytes` on every rank
  double all_gather(double bytes) const;      // to `bytes` on every rank
  double all_reduce(double bytes) const { return reduce_scatter(bytes) + all_gather(bytes); }
  // Of few bytes, where latency counts: up and down a tree, as NCCL sends them.
  double small_all_reduce(double bytes) const;
  // Bytes that a rank sends in one of the two.
  double bytes_sent(double bytes) const { return bytes * (ranks - 1) / ranks; }
};

// A step of one rank, whose micro-batches are `work`; the last one's backward hides the reduction.
struct StepTime {
  double compute = 0;         // forward and backward
  double exposed_reduce = 0;  // of the gradients' reduction, after the backward
  double optimizer = 0;
  double exposed_gather = 0;      // the next forward waits for weights
  double reduce = 0, gather = 0;  // the whole of the communication
  double exposed() const { return exposed_reduce + exposed_gather; }
  double seconds() const { return compute + exposed() + optimizer; }
};
// zero, wire, overlap as in the deck; `optimizer_bandwidth`: B/s at which the update goes through
// memory.
StepTime step_time(std::span<const MicroBatchCost> work, std::span<const BucketSchedule> buckets,
                   const CommModel& comm, const ParallelDeck& parallel, bool bf16_model,
                   double optimizer_bandwidth);
// What the exchanges within one micro-batch take (train/task.h), over the ranks of `comm`.
double inner_exchange_seconds(const TrainingTask& task, const CommModel& comm);
// Bytes that the update of one element moves: gradient read for its norm and for the update,
// master, moments and EMA read and written, the bf16 weight written.
constexpr double optimizer_bytes_an_element = 42;

// Expected maximum of n standard normals (docs/plan.md, Expected maximum): 1.42 for 8, 2.59 for
// 128.
double expected_maximum(int n);
// Efficiency of n ranks whose step times vary with coefficient `cv` when all wait for the slowest.
inline double efficiency_of_variation(double cv, int n) {
  return 1 / (1 + cv * expected_maximum(n));
}

}  // namespace weft
