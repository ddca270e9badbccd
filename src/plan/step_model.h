// Closed formulas for the time of a training step: what each micro-batch computes, when each bucket of gradients is complete,
// what its communication takes, and what of that the computation cannot hide. `weft plan` prints them; `weft simulate` plays
// the same structures message by message. All times in seconds.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "config/deck.h"
#include "data/clip_source.h"
#include "models/stdit3/options.h"
#include "nn/parameters.h"
#include "plan/machine.h"

namespace weft {

// How fast a device works. Operations of attention are counted as nobody could do with fewer: 4 S C N forward, 2.5 times
// that backward.
struct Rates {
  double products = 0;            // matrix products, FLOP/s
  double attention_forward = 0;   // FLOP/s
  double attention_backward = 0;  // FLOP/s
  double bandwidth = 0;           // operations that memory bounds, B/s
  double gaps = 0;                // share added for launches and gaps
  std::string origin;             // where the figures come from: said in every report
  double convolutions = 0;        // FLOP/s of the VAE's (plan/op_times.h); 0: not known
};
// Targets for an H200 (performance study B4, B9), not measurements.
Rates h200_targets();
// Rates from a JSON file with the names above as keys ("origin" may be left out, and "convolutions" where
// nothing is planned that has any). Exit::usage if it is not that.
Rates read_rates(const std::string& file);

// A micro-batch of one bucket: B clips of T frames of S tokens with L caption rows each.
struct MicroBatchShape {
  std::int64_t clips = 1, T = 1, S = 1, L = 300;
  double recompute = 0;  // share of the blocks whose forward runs twice
  std::int64_t tokens() const { return clips * T * S; }
};

// Of a bucket's clips in patches of the model; `recompute` as planned.
MicroBatchShape shape_of(const Stdit3Config& model, const Bucket& bucket, std::int64_t clips,
                         double recompute);

// What a micro-batch takes on one rank (one of `sp` that share its tokens).
struct MicroBatchCost {
  double forward = 0;
  double backward = 0;  // without the forward that is run again
  double again = 0;     // that: spread over the backward
  double exchange = 0;  // in exchanges of sequence parallelism, forward and backward together
  double flops = 0;     // of the model on this rank: 3 times the forward, nothing counted twice
  double seconds() const { return forward + backward + again + exchange; }
  MicroBatchCost part(double share) const {
    return {share * forward, share * backward, share * again, share * exchange, share * flops};
  }
};
// By the formulas: for each operation the larger of FLOPs over their rate and bytes over the bandwidth.
MicroBatchCost micro_batch_cost(const Stdit3Config& model, const MicroBatchShape& shape,
                                const Rates& rates, int sp = 1, double exchange_bandwidth = 0);

// One bucket of gradients, in the order in which they go on the wire.
struct BucketSchedule {
  std::int64_t elements = 0;  // padded; 4 B each in f32, 2 B as bf16
  bool bf16_only = false;     // weights gathered as bf16 in a bf16 model, else as f32
  double ready = 0;           // complete when this share of the last micro-batch's backward is done
  double needed = 0;  // its weights are first used when this share of the next forward is done
};
// Of a table that is laid out (ParameterTable::allocate). Blocks count alike; what comes before and after them not at all.
std::vector<BucketSchedule> bucket_schedule(const ParameterTable& table, const Stdit3Config& model);

// Collectives over `ranks` ranks, `ranks_a_node` on each node.
struct CommModel {
  int ranks = 1;
  Machine machine;
  // Hierarchical: inside the nodes and between them at once, pipelined. Flat: one ring (per card) through all ranks, in which
  // every byte leaves each node once.
  bool hierarchical = true;

  int nodes() const;
  double reduce_scatter(double bytes) const;  // of `bytes` on every rank
  double all_gather(double bytes) const;      // to `bytes` on every rank
  double all_reduce(double bytes) const { return reduce_scatter(bytes) + all_gather(bytes); }
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
// zero, wire, overlap as in the deck; `optimizer_bandwidth`: B/s at which the update goes through memory.
StepTime step_time(std::span<const MicroBatchCost> work, std::span<const BucketSchedule> buckets,
                   const CommModel& comm, const ParallelDeck& parallel, bool bf16_model,
                   double optimizer_bandwidth);
// Bytes that the update of one element moves: gradient read for its norm and for the update, master, moments and EMA read and
// written, the bf16 weight written.
constexpr double optimizer_bytes_an_element = 42;

// Expected maximum of n standard normals (performance study B7): 1.42 for 8, 2.61 for 128.
double expected_maximum(int n);
// Efficiency of n ranks whose step times vary with coefficient `cv` when all wait for the slowest.
inline double efficiency_of_variation(double cv, int n) {
  return 1 / (1 + cv * expected_maximum(n));
}

}  // namespace weft
