// Training steps of many ranks played as events: who computes when, which transfer waits for whom.
// The machine's network and shared processors are SimGrid's (flows that share links fairly).
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <vector>

namespace weft::simulation {

// Nodes of equal ranks. A collective is a ring through all ranks that enters and leaves each node
// once, all network cards of a node side by side, as NCCL lays its rings; or `two_level`: within
// the nodes, and between them what is left, at once.
struct Network {
  int ranks_per_node = 8;
  double inside_rate = 370e9;  // bytes/s that a rank sends its neighbour in the node
  double node_rate = 400e9;    // bytes/s into a node, and out of it
  // Seconds: of an operation, of a ring's step inside a node, of one between nodes.
  double start = 0, hop_inside = 0, hop_between = 0;
  bool two_level = false;
  // Processors that a node's ranks compute on, and share fairly if they are fewer; 0: each rank has
  // a device of its own.
  int cores_per_node = 0;
};

// Gradients that travel together. `ready`: the share of the backward after which the last of them
// is complete; `needed`: the share of the forward before which their weights must have come back.
// In the backward's order: `ready` grows, `needed` falls.
struct TransferBucket {
  double gradient_bytes = 0, weight_bytes = 0;
  double ready = 1, needed = 0;
};

// Seconds of a micro-batch.
struct Work {
  double forward = 0, backward = 0;
};
using RankWork = std::vector<std::vector<Work>>;  // [rank][micro-batch]

// weft's own step (train/trainer.cpp): no barrier, buckets on the wire as they are ready, one
// operation at a time and in the same order on every rank; the weights come back under the next
// forward.
struct Overlapped {
  std::vector<TransferBucket> buckets;
  // parallel.zero = 3: in every micro-batch gathered forward and backward, and summed. All ranks go
  // through as many micro-batches as the one with the most.
  std::vector<TransferBucket> blocks;
  bool sharded = true;        // parallel.zero = 1 or 3: reduce-scatter, all-gather; else all-reduce
  bool overlap = true;        // false: wait for each transfer at once
  bool bf16_wire = false;     // parallel.wire: gradients travel as bf16
  double optimizer = 0;       // seconds of a rank's optimizer step
  double report_bytes = 128;  // of the small exchange that ends a step's reductions
  double host = 0;            // seconds a step that a rank spends on nothing of the above
  std::function<RankWork(std::int64_t step)> work;
};

// One step, over all ranks. busy: forward, backward and optimizer; a rank's step is busy + wait +
// exposed.
struct StepTimes {
  double seconds = 0;
  double mean_busy = 0, longest_busy = 0;  // seconds
  double wait = 0;                         // mean seconds that a rank waited for a slower one
  double exposed = 0;  // mean seconds of transfers (and of their latency) that nothing hid
  double spread() const { return mean_busy > 0 ? longest_busy / mean_busy - 1 : 0; }
};

// `steps` steps after `warmup` ones that are not returned. Deterministic.
std::vector<StepTimes> play(const Network& network, int ranks, const Overlapped& job, int steps,
                            int warmup);

// What a collective takes alone: seconds for `bytes` of payload. all_reduce = reduce_scatter +
// all_gather; bf16_sum is the reduce_scatter of parallel.wire = "bf16": weft's own, in two levels
// (parallel/nccl_collectives.cpp).
enum class Collective { reduce_scatter, all_gather, all_reduce, bf16_sum };
double play_collective(const Network& network, int ranks, Collective kind, double bytes);

// What crosses a node's inside and its network cards in one operation, and how long its first byte
// takes.
struct Traffic {
  double inside = 0, between = 0;  // bytes
  double latency = 0;              // seconds
};
inline Traffic traffic_of(const Network& network, int ranks, Collective kind, double bytes) {
  if (ranks == 1) return {};
  const double rounds = kind == Collective::all_reduce ? 2 : 1;
  const double n = ranks, inside = std::min(ranks, network.ranks_per_node);
  const double nodes = std::ceil(n / network.ranks_per_node);
  const auto around = [&](double ring) { return rounds * (ring - 1) / ring * bytes; };
  // A flat ring has n - 1 steps, nodes - 1 of them over the network; two levels have the steps of
  // both rings.
  const double inside_steps = network.two_level ? inside - 1 : n - nodes;
  Traffic t;
  t.latency = network.start +
              rounds * (inside_steps * network.hop_inside + (nodes - 1) * network.hop_between);
  if (inside > 1) t.inside = around(network.two_level ? inside : n);
  if (nodes > 1) t.between = around(network.two_level ? nodes : n);
  if (kind == Collective::bf16_sum && nodes > 1 && network.two_level) {
    // The sum inside each node is in f32, twice the bytes, and ends before that between nodes
    // begins.
    t.latency += 2 * t.inside / network.inside_rate;
    t.inside = 0;
  }
  return t;
}

// Closed formulas of the same: every rank of a ring of n sends its neighbour (n-1)/n of the bytes
// (twice for all_reduce) through the slowest link, and the ring's steps add their latency.
inline double collective_seconds(const Network& network, int ranks, Collective kind, double bytes) {
  const Traffic t = traffic_of(network, ranks, kind, bytes);
  return t.latency + std::max(t.inside / network.inside_rate, t.between / network.node_rate);
}

}  // namespace weft::simulation
