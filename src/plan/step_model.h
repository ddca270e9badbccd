// The machine that a plan is made for, and closed formulas for the time of a training step around
// what its micro-batches compute (train/step_cost.h): what communication takes, and what of that
// the computation cannot hide. `weft plan` prints them; validation/simulate plays the same
// structures message by message. Bandwidths count what one direction carries; times in seconds.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "config/deck.h"
#include "tensor/device.h"
#include "train/step_cost.h"

namespace weft {

inline double gb(double bytes) { return bytes / 1e9; }

// Nodes of ranks with fast links inside and network cards between them.
struct Machine {
  std::string name;  // as given: "8x400", "1x200", "local"
  DeviceKind device = DeviceKind::cuda;

  int ranks_a_node = 8;
  // Inside a node: the bus bandwidth of a ring over all its ranks (nccl-tests' busbw), i.e. what
  // each rank sends meanwhile.
  double link_bandwidth = 370e9;
  double link_latency = 3e-6;  // of one message between ranks of a node
  // How much faster all-gathers are than reduce-scatters, which also add.
  double gather_factor = 1;

  // Between nodes: cards of a node, each with its peak and the share of it that collectives reach.
  int cards_a_node = 8;
  double card_bandwidth = 50e9;
  double card_share = 0.92;
  double card_latency = 6e-6;

  double memory_bytes = 0;  // of a rank's device
  double memory_bandwidth = 4.3e12;
  double storage_bandwidth = 10e9;    // of the file system, all ranks together
  double host_copy_bandwidth = 50e9;  // a rank's state to host memory, for checkpoints

  // What a node sends through all its cards.
  double node_bandwidth() const { return cards_a_node * card_bandwidth * card_share; }
};

// The described machine with the fabric "8x400", "1x200" or any other CARDSxGBITS a node; nodes of
// that many H200 with NVLink (docs/plan.md, Machine constants). `memory_gb` in 1e9 bytes.
// Exit::usage for a fabric that is none of these, naming the nearest.
Machine described_machine(const std::string& fabric, double memory_gb, int ranks_a_node = 8);

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
  // The sum of so many gradients, to parts or (`for_all`) to all of them on every rank. With
  // parallel.wire = "bf16" weft sums inside each node in f32, then between nodes in bf16
  // (parallel/nccl_collectives.cpp), one after the other.
  double sum_gradients(double elements, bool bf16_wire, bool for_all) const;
  // The all-reduce of few bytes, where latency counts: up and down a tree, as NCCL sends them.
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
// How often block b of `blocks`, in the backward's order, is gathered in a step with parallel.zero
// = 3 (train/sharded_blocks.h): in every forward and backward, but that the two computed last are
// still there for what follows.
double block_gathers(std::size_t b, std::size_t blocks, double micro_batches);
// What the all-reduces within one micro-batch take (MicroBatchCost), over the ranks of `comm`.
double all_reduce_seconds(const MicroBatchCost& cost, const CommModel& comm);
// Bytes that the update of one element moves: gradient read for its norm and for the update,
// master, moments and EMA read and written, the bf16 weight written.
constexpr double optimizer_bytes_an_element = 42;
// Further bytes for each average beyond the first: master read, average read and written.
constexpr double bytes_a_further_average = 12;

// Expected maximum of n standard normals (docs/plan.md, Expected maximum): 1.42 for 8, 2.59 for
// 128.
double expected_maximum(int n);
// Efficiency of n ranks whose step times vary with coefficient `cv` when all wait for the slowest.
inline double efficiency_of_variation(double cv, int n) {
  return 1 / (1 + cv * expected_maximum(n));
}

}  // namespace weft
