#include "train/measure.h"

#include <algorithm>

#include "core/clock.h"
#include "tensor/tensor.h"
#include "train/data_parallel.h"
#include "train/memory_plan.h"

namespace weft {

double mean_over_ranks(double value, MPI_Comm world) {
  double sum = 0;
  int ranks = 1;
  MPI_Comm_size(world, &ranks);
  MPI_Allreduce(&value, &sum, 1, MPI_DOUBLE, MPI_SUM, world);
  return sum / ranks;
}

double now_done() {
  if (on_cuda()) device_runtime().synchronize();
  return now_seconds();
}

double time_update(const TrainDeck& how, ParameterTable& params, MPI_Comm world) {
  OptimizerState state(params, false, 0, 1);
  Tensor squares = Tensor::persistent({1}, DType::f64);
  std::vector<double> seconds;
  for (int run = 0; run <= measured_runs; ++run) {
    MPI_Barrier(world);
    const double start = now_done();
    for (int b = 0; b < static_cast<int>(params.buckets().size()); ++b)
      optimizer_step(how, run, squares, state, b);
    // The first run is a warm-up.
    if (run > 0) seconds.push_back(now_done() - start);
  }
  return mean_over_ranks(upper_median(seconds), world) /
         static_cast<double>(params.grads().numel());
}

void allocate_for_measuring(TrainingTask& task, const Deck& deck) {
  // 4 bytes an element: bucket_mib counts gradients in f32.
  task.params().allocate(static_cast<std::int64_t>(deck.parallel.bucket_mib * (1 << 20) / 4),
                         task.bf16(), true);
  task.params().initialise(1);
}

MeasuredTimes time_micro_batch(TrainingTask& task, const Bucket& bucket, std::int64_t clips,
                               MPI_Comm world) {
  LoadedBatch batch;
  for (std::int64_t i = 0; i < clips; ++i) {
    batch.what.clips.push_back(i);
    batch.what.samples.push_back(i);
  }
  batch.info.resize(clips);
  const Tensor bytes =
      Tensor::persistent({clips * static_cast<std::int64_t>(bucket.clip_bytes())}, DType::u8);
  const auto arena =
      Arena::reserve(plan_step_memory(task, bucket, clips, 0).bytes + (std::size_t{256} << 20));
  const ArenaScope scope(*arena);
  std::vector<double> forward, backward;
  for (int run = 0; run <= measured_runs; ++run) {
    batch.step = run;
    MPI_Barrier(world);  // all ranks at once: they compete for caches and memory
    task.params().begin_step([](int) {});
    const double start = now_done();
    const TrainingWork work = task.prepare(bucket, batch, bytes, 0, 1.0f);
    Tape tape;
    work.parts.front()(tape);
    const double half = now_done();
    tape.backward();
    const double end = now_done();
    if (run == 0) continue;
    forward.push_back(half - start);
    backward.push_back(end - half);
  }
  return {mean_over_ranks(upper_median(forward), world),
          mean_over_ranks(upper_median(backward), world)};
}

}  // namespace weft
