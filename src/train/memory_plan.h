// Predicts the memory of a step before it runs, and how much of the model each bucket must
// recompute to fit.
#pragma once

#include <mpi.h>

#include <algorithm>
#include <span>
#include <string>
#include <vector>

#include "data/clip_source.h"
#include "parallel/rank_device.h"
#include "tensor/tensor.h"
#include "train/task.h"

namespace weft {

// Peak arena bytes of forward and backward of one micro-batch of `batch_size` clips of `bucket`
// with the share `recompute` of its blocks recomputed. From a dry run, so the figure is exact for
// captions of full length. `device` need not be present. The arena has `capacity` bytes (0: no
// limit); up to `kept` bytes of optional activations are kept (Tape::keep).
MemoryNeed plan_step_memory(TrainingTask& task, const Bucket& bucket, std::int64_t batch_size,
                            double recompute, DeviceKind device = this_device().kind,
                            std::size_t capacity = 0, std::size_t kept = 0);

struct StepMemory {
  double recompute = 0;   // share of the blocks, for TrainingTask::prepare()
  std::size_t bytes = 0;  // peak of the arena
  std::size_t kept = 0;   // of them optional activations, for TrainingWork
};

// For each bucket the smallest share of recomputed blocks, in steps of one block and at least the
// deck's, with which a micro-batch of batch_sizes[bucket] clips (or as many as there are) fits into
// an arena of `capacity` bytes: short clips pay nothing for long ones. A 32nd of it stays free,
// because shorter captions leave other holes than the planned ones. Exit::usage for a bucket that
// does not fit even with every block recomputed; the error names the batch size that does.
// `capacity` must be the same on all ranks, because placements follow the costs of recomputation.
// `keep`: a GPU also keeps as many optional activations as fit beside that, where nothing is
// recomputed beyond the deck's share. They may be rounded otherwise than recomputed ones, so a run
// that must not depend on free memory (parallel.deterministic) does without.
std::vector<StepMemory> plan_memory(TrainingTask& task, std::span<const Bucket> buckets,
                                    std::span<const std::int64_t> batch_sizes, std::size_t capacity,
                                    DeviceKind device = this_device().kind, bool keep = false);

// Whether activations are kept so: the way "kept" (ops/ways.h) is tried, and results may depend on
// free memory.
inline bool keeps_activations(const Deck& deck) {
  return std::ranges::count(deck.device.tried, "kept") > 0 && !deck.parallel.deterministic;
}

// A run that goes on keeps no more than before its restart, so that it repeats its bits: `saved` is
// the kept_text() of then. A warning where less fits now.
std::string kept_text(std::span<const StepMemory> plan, std::span<const Bucket> buckets);
void keep_as_before(std::vector<StepMemory>& plan, std::span<const Bucket> buckets,
                    const std::string& saved);

// Gives every bucket the largest share of all. For ranks that exchange within micro-batches
// (TrainingTask::lockstep_ranks), whose buckets differ: recomputed blocks exchange again, and all
// ranks must make the same exchanges.
void recompute_alike(TrainingTask& task, std::span<const Bucket> buckets,
                     std::span<const std::int64_t> batch_sizes, std::vector<StepMemory>& plan,
                     DeviceKind device = this_device().kind);

// The part of a GPU's `free` bytes that an arena may take. A 16th stays free for cuBLASLt's
// workspace, recorded graphs and CUDA itself. Where there are several ranks, so does a part for
// NCCL, which takes buffers when it first uses a connection and ends the job if it cannot: 3 GiB,
// or a 16th where that is less.
constexpr std::size_t arena_share(std::size_t free, int ranks) {
  return free - free / 16 - (ranks > 1 ? std::min(std::size_t{3} << 30, free / 16) : 0);
}
// What a GPU's arena has beside `planned` bytes, for scratch memory of operations.
constexpr std::size_t arena_scratch(std::size_t planned) {
  return planned / 8 + (std::size_t{64} << 20);
}
// The arena's capacity in bytes: memory.arena_gib, or what the host has for each of its ranks, or
// the arena_share() of what is free on the GPU.
std::size_t arena_capacity(const MemoryDeck& deck, int ranks_on_host, int ranks = 1);
// The same where ranks may share a GPU: each gets its part of what is free on it.
std::size_t arena_capacity(const MemoryDeck& deck, const RankDevice& device);

// Bytes on one rank.
struct MemoryKinds {
  std::size_t weights = 0;    // that products read: bf16 in a bf16 model
  std::size_t masters = 0;    // f32: whole, or this rank's share
  std::size_t fixed = 0;      // parameters that are not trained
  std::size_t gradients = 0;  // f32
  std::size_t moments = 0, ema = 0;
  std::size_t samples = 0;      // weights that [samples] keeps beside the training's
  std::size_t activations = 0;  // peak of the largest bucket
  std::size_t staging = 0;      // clips in flight to the device
  std::size_t reserve = 0;  // left for libraries, and for what operations need inside themselves
  std::size_t state() const {
    return weights + masters + fixed + gradients + moments + ema + samples;
  }
  std::size_t total() const { return state() + activations + staging + reserve; }
};
// The state's part of it, as the trainer lays it out (train/data_parallel.h), on the rank with most
// of it. `averages`: decays of train.ema_decay.
MemoryKinds state_bytes(const ParameterTable& table, bool bf16, bool sharded, int ranks,
                        bool squares = true, std::size_t averages = 1);

// Collective. Bytes that this rank may still take: its even share of the GPU's free memory, or of
// the host's available memory. A 16th stays free for what weft does not count.
std::size_t free_memory(MPI_Comm world);

}  // namespace weft
