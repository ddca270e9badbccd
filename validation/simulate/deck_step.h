// A deck's training steps, to be played on many ranks of a described machine (play.h). The step
// plan and the sharing out are the trainer's, the buckets those of the parameter table, and what
// each micro-batch costs is planned (plan/plan.h) or was measured.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "data/clip_source.h"
#include "data/step_plan.h"
#include "plan/plan.h"
#include "validation/simulate/play.h"

namespace weft::simulation {

// Two-level collectives, as `weft plan` counts them.
Network network_of(const Machine& machine);
// This host or one like it: ranks that share `cores` processors, and hand each other `rate`
// bytes/s.
Network local_network(int cores, double rate);

// Seconds of one micro-batch of each bucket at its batch size, and of the rest of a step.
struct StepCosts {
  std::vector<Work> work;  // [bucket]
  double optimizer = 0;    // for all parameters; divided by the ranks if sharded
  double host = 0;         // a step's other work of a rank
  std::string origin;      // reported with every result
};

// Those of a plan.
StepCosts planned_costs(const Plan& plan, bool sharded);

// Measured ones: a run's directory (the costs that its ranks agreed on, from its newest checkpoint,
// and the medians of its metrics), or a JSON file {"seconds": {bucket's name: seconds of a
// micro-batch, ...}, "optimizer": seconds, "host": seconds} of which the last two may be left out.
// The backward takes 2 + recompute times the forward. Exit::usage or Exit::checkpoint for what is
// not that, or lacks a bucket.
StepCosts measured_costs(const std::string& run_or_file, const Deck& deck,
                         std::span<const Bucket> buckets, std::span<const double> recompute);

// What a simulation of a deck is based on.
struct DeckStep {
  std::vector<Bucket> buckets;            // of the data
  std::vector<std::int64_t> batch_sizes;  // clips in a micro-batch of each
  // The step plan for that many micro-batches a step; null: a StepPlanner of the above.
  std::function<std::shared_ptr<const StepPlan>(std::int64_t micro_batches)> planner;
  std::vector<BucketSchedule> schedule;  // of the gradients
  StepCosts costs;
  std::int64_t micro_batches = 1;  // a step, over all ranks
  std::uint64_t seed = 0;
  int sp = 1;  // ranks that share a micro-batch: each has its time
  // How many of `ranks` ranks exchange within micro-batches, where any do: they wait for the
  // slowest in each, and `exchange` seconds go on top.
  std::function<int(int ranks)> lockstep;
  std::function<double(int ranks)> exchange;
  // Coefficient of variation of a rank's time for a step, drawn anew for each step and rank from a
  // log-normal distribution.
  double variation = 0;
  bool sharded = true, overlap = true, bf16_wire = false, bf16_model = false;
  bool in_parts = false;  // parallel.zero = 3
};

// weft's own step on `ranks` ranks.
Overlapped overlapped_job(const DeckStep& step, int ranks);

// The ranks' times for a step without variation: where each has `micro_batches`/ranks of them, what
// the sharing out leaves.
std::vector<double> rank_seconds(const DeckStep& step, int ranks, std::int64_t number);

}  // namespace weft::simulation
