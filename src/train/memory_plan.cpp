#include "train/memory_plan.h"

#include <unistd.h>

#include "core/arena.h"
#include "train/batch.h"

namespace weft {

std::size_t plan_step_memory(const Deck& deck, Stdit3& model, const Bucket& bucket,
                             std::int64_t batch_size) {
  const auto arena = Arena::planning();
  const ArenaScope scope(*arena);
  LoadedBatch clips;
  clips.what.clips.resize(static_cast<std::size_t>(batch_size));
  const TrainingBatch batch = make_batch(deck, bucket, clips, Tensor(), nullptr);
  model.params().begin_step([](int) {});
  Tape tape;
  flow_loss(tape, model, batch.x0, batch.eps, batch.in, 1.0f);
  tape.backward();
  return arena->peak();
}

std::size_t arena_capacity(const MemoryDeck& deck, int ranks_on_host) {
  if (deck.arena_gib > 0) return static_cast<std::size_t>(deck.arena_gib * (1ull << 30));
  if (on_cuda()) {
    // The state is there already. NCCL's buffers, cuBLASLt's workspace and CUDA's own needs get the rest.
    const std::size_t free = device_runtime().free_bytes();
    return free - free / 16;
  }
  const auto total = static_cast<std::size_t>(sysconf(_SC_PHYS_PAGES)) *
                     static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  return total / static_cast<std::size_t>(ranks_on_host);
}

}  // namespace weft
