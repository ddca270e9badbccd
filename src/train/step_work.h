// The work of a step on this rank: which micro-batches it takes (WorkPlan), and how each is run
// (MicroBatchRunner). On a GPU neither waits for the device: micro-batches are recorded as graphs
// and replayed (StepGraphs), and clips are copied while the micro-batch before is computed
// (ClipStaging).
#pragma once

#include <array>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "data/prefetch.h"
#include "data/step_plan.h"
#include "nn/parameters.h"
#include "parallel/communicator.h"
#include "tensor/device.h"
#include "tensor/tensor.h"
#include "train/cost_table.h"
#include "train/memory_plan.h"
#include "train/metrics/metrics.h"
#include "train/metrics/step_report.h"
#include "train/task.h"

namespace weft {

// Which micro-batches every rank takes in a step: a function of (seed, step) and of the planned
// costs, so that each rank knows all of it without asking. Also what micro-batches are measured to
// cost, on which the ranks agree now and then.
class WorkPlan {
 public:
  // The ranks that share clips form a group, of consecutive ranks: they are most likely on one
  // node.
  struct Groups {
    int own = 0, count = 1;  // this rank's, of how many
    int ranks = 1;           // in each
    SyncMode sync = SyncMode::per_step;
  };
  // Rank `rank` of `ranks`, of which every `sp` share clips. `blocks`: parallel.zero = 3 shards the
  // task's blocks.
  static Groups groups_of(const TrainingTask& task, bool blocks, int rank, int ranks, int sp);
  // `memory` [bucket] says what is recomputed, and so what a micro-batch costs on such a `device`.
  // `saved_costs`: of a checkpoint; empty for a new run.
  WorkPlan(const ClipSource& source, TrainingTask& task, const Deck& deck,
           std::vector<std::int64_t> batch_sizes, std::span<const StepMemory> memory,
           DeviceKind device, Groups groups, const std::string& saved_costs);

  // The micro-batches of a step over all ranks, shared out by the planned costs.
  struct Shares {
    std::vector<MicroBatch> plan;
    std::vector<int> owner;          // [micro-batch] group
    std::vector<std::size_t> order;  // in which each takes its own
  };
  Shares shares(std::int64_t step) const;
  // This rank's micro-batches of a step, with their numbers in it. From any thread.
  using Work = Prefetcher::Work;
  Work mine(std::int64_t step) const;

  struct Step {
    Work mine;
    std::vector<SampleId> samples;     // of all ranks, in the order of the plan
    std::vector<StoreMetrics> stores;  // names and counts; empty where there are not several
    std::vector<double> expected;  // [rank] seconds, or the planner's unit before any are measured
    std::size_t most = 0;          // micro-batches of any rank
  };
  Step step(std::int64_t step) const;
  // The share of its bucket's cost that a micro-batch takes: less than 1 if clips are shortened.
  double share_of(const MicroBatch& clips, std::int64_t step) const;

  // Seconds that a micro-batch of the bucket took here, scaled to its full cost.
  void measured(int bucket, double seconds) { costs_.measured(bucket, seconds); }
  // After such steps the ranks exchange what they measured: send() issues the sum over ranks,
  // fetch() copies it to the host (as HostCopy does), agree() takes it over.
  bool exchanges_after(std::int64_t step) const { return costs_.due(step); }
  Communicator::Ticket send(Communicator& comm);
  std::span<const double> fetch() { return host_sums_.fetch(sums_); }
  void agree(std::span<const double> sums) { costs_.agree({sums.begin(), sums.end()}); }
  // For checkpoints.
  std::string costs_text() const { return costs_.to_text(); }

 private:
  const ClipSource& source_;
  const TrainingTask& task_;
  Groups groups_;
  std::unique_ptr<StepPlan> planner_;
  CostTable costs_;
  Tensor sums_;  // f64 [2 buckets]
  HostCopy host_sums_;
};

// On a GPU the work of a micro-batch, some thousand kernels, is recorded once for each shape and
// then replayed: the host issues a few graphs instead. This is sound because the arena gives equal
// sequences of calls equal addresses.
//
// Collectives are never recorded. NCCL requires that all ranks capture an operation together and
// replay it from that capture; here ranks meet a shape in different steps. So a recording is cut at
// each collective, and the host issues it between two graphs: it still overlaps with the rest of
// the backward.
class StepGraphs {
 public:
  explicit StepGraphs(bool enabled) : enabled_(enabled) {}

  // Runs `work`, or replays what was recorded under the same key and with the same gradients of
  // `table` written, for those are added to and the others overwritten. The key names everything
  // else that the work depends on besides the contents of its tensors: their addresses and shapes,
  // and numbers passed by value. The first run of a key is not recorded (matrix products choose
  // their algorithms), the second is. A replay repeats only `table` of the host's side of `work`:
  // which gradients are written, which buckets announced.
  void run(const std::string& key, ParameterTable& table, const std::function<void()>& work);
  // Runs host work in the middle of `work`, now and in every replay at the same place: behind all
  // device work before it. `act` is kept as long as the graphs, so it must not refer to anything
  // that belongs to one step.
  void aside(const std::function<void()>& act);

  std::int64_t runs() const { return runs_; }
  std::int64_t replays() const { return replays_; }
  std::size_t recorded() const { return recorded_; }

 private:
  // Further shapes are not recorded: graphs of many shapes would take unbounded memory.
  static constexpr std::size_t most_graphs = 96;

  struct Part {
    DeviceGraph graph;
    std::function<void()> then;  // what was set aside behind it; empty behind the last
  };
  struct Entry {
    bool seen = false, recorded = false;
    std::vector<Part> parts;
    ParameterTable::StepState after;
  };
  // Ends the recording under way and runs it.
  void cut(std::function<void()> then);
  // Frees all graphs and records no more: memory is short.
  void drop();

  bool enabled_;
  Entry* recording_ = nullptr;
  bool capturing_ = false;
  std::map<std::pair<std::string, std::vector<bool>>, Entry> entries_;
  std::int64_t runs_ = 0, replays_ = 0;
  std::size_t recorded_ = 0;
};

// Brings the clips of a micro-batch to the rank's device. On a GPU two buffers take turns: while
// the compute stream works on one, the copy stream fills the other. Events order the two streams;
// the host does not wait. On the CPU clips stay where they are.
class ClipStaging {
 public:
  // `bytes` of the largest micro-batch.
  explicit ClipStaging(std::size_t bytes);

  // The clips as u8 on the device. The caller may overwrite `clips` after consumed(), on a GPU at
  // once.
  Tensor stage(std::span<const std::byte> clips);
  // To call once all work on what stage() returned has been issued to the compute stream.
  void consumed();

 private:
  std::array<Tensor, 2> buffers_;
  std::array<DeviceEvent, 2> free_;  // after the last work on each
  std::size_t turn_ = 0;
};

// Weights that begin as zeros, as many models' last layers do: all gradients before them are zeros
// too, by which no way of computing can be told to be wrong. Other values stand in their place
// until restore(), which is not to be called where something has failed.
class NonZeroWeights {
 public:
  explicit NonZeroWeights(ParameterTable& table);
  void restore();

 private:
  std::vector<Parameter*> zero_;
};

// Runs micro-batches: from the clips' bytes to losses, and gradients in the task's table.
class MicroBatchRunner {
 public:
  // `memory` and `batch_sizes` [bucket].
  MicroBatchRunner(TrainingTask& task, const ClipSource& source, StepGraphs& graphs,
                   std::span<const StepMemory> memory, std::span<const std::int64_t> batch_sizes);

  using OnLoss = std::function<void(const TrainingLoss&)>;
  // Gradients are overwritten by the first micro-batch of a step and added to by the others; uses
  // of parameters are counted in the last. Each clip's loss counts `weight` times.
  void run(const LoadedBatch& clips, bool last, float weight, const OnLoss& on_loss);
  // The same alone, to see what it gives: reads the clips, overwrites the gradients, records and
  // sends nothing. `on_ready` is called for each bucket of parameters when its gradient is there.
  void run_again(int index, const MicroBatch& what, std::int64_t step, float weight,
                 const OnLoss& on_loss, const std::function<void(int bucket)>& on_ready);
  // For ways of computing to be measured (ops/ways.h): twice, for gradients that are overwritten
  // and that are added to. Nothing is recorded.
  void try_out(const LoadedBatch& clips);

 private:
  TrainingWork prepare(const LoadedBatch& clips, float weight);

  TrainingTask& task_;
  const ClipSource& source_;
  StepGraphs& graphs_;
  std::span<const StepMemory> memory_;
  ClipStaging staging_;
};

}  // namespace weft
