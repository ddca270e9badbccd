// Reads the clips of the coming steps ahead of the trainer: a fixed ring of slots, filled by N
// reader threads.
#pragma once

#include <functional>
#include <memory>

#include "data/step_plan.h"

namespace weft {

struct LoadedBatch {
  std::int64_t step = 0;
  int index = 0;  // of the micro-batch within its step
  MicroBatch what;
  std::vector<ClipInfo> info;            // one a clip
  std::vector<std::vector<float>> text;  // [B] captions' features, where the bucket has any
  std::span<const std::byte> bytes;      // [B] clips, valid until the next call of next()
  double waited_seconds = 0;             // how long next() waited for it
};

class Prefetcher {
 public:
  // `next_work(step)` lists this rank's micro-batches of a step with their index in the step. It is
  // called in order of steps, from `first_step` until `last_step` (exclusive), by the constructor,
  // by begin_step() and by next(): on the caller's thread, never on a reader's. Its exceptions
  // emerge there. It is asked for steps up to `horizon` after the one that has begun, and no
  // further. `max_damaged` is data.max_damaged: up to that share of the clips, a damaged one is
  // replaced by the next whole one of its bucket, which `what`, `info` and `text` then describe; a
  // WARN names it. With one more, or a bucket without any whole clip, next() throws DamagedClip.
  // Memory: `slots` times the largest micro-batch; pages that no clip has reached cost nothing.
  using Work = std::vector<std::pair<int, MicroBatch>>;
  Prefetcher(const ClipSource& source, std::function<Work(std::int64_t step)> next_work,
             std::int64_t first_step, std::int64_t last_step, int slots, int readers,
             std::int64_t horizon, double max_damaged = 0);
  ~Prefetcher();  // stops the readers, even at work

  // The caller is in `step` now: called in order, also for steps in which this rank has no work.
  // Before the first call, `first_step` has begun.
  void begin_step(std::int64_t step);

  // This rank's next micro-batch, in order of steps and index; it belongs to a step within the
  // horizon. Rethrows a reader's error.
  const LoadedBatch& next();

  // The number of readers for a rank with that many threads: enough to keep up, few enough to leave
  // the threads free.
  static int default_readers(int threads);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace weft
