#include "train/task.h"

#include "core/error.h"
#include "core/trace.h"

namespace weft {

void run_parts(const TrainingWork& work, ParameterTable& params, bool counting,
               const std::function<void(const TrainingLoss&)>& on_loss) {
  for (std::size_t i = 0; i < work.parts.size(); ++i) {
    // Only the last part completes the gradients, so only its uses may release a bucket.
    const CountingScope counted(params, counting && i + 1 == work.parts.size());
    Tape tape;
    TrainingLoss loss;
    {
      const trace::Scope traced("forward", trace::Lane::compute);
      loss = work.parts[i](tape);
    }
    const trace::Scope traced("backward", trace::Lane::compute);
    tape.backward();
    on_loss(loss);
  }
}

std::vector<BucketSchedule> TrainingTask::schedule(std::span<const Bucket> buckets) {
  return dry_run_schedule(*this, buckets);
}

std::vector<MicroBatchCost> TrainingTask::costs(const PlannedWork& work, const Rates& rates,
                                                double) {
  std::vector<MicroBatchCost> costs;
  for (std::size_t i = 0; i < work.buckets.size(); ++i)
    costs.push_back(dry_run_cost(*this, work.buckets[i], work.clips[i], work.recompute[i], rates));
  return costs;
}

MeasuredWork TrainingTask::measure(const PlannedWork&, MPI_Comm) {
  throw Error(Exit::usage, "--fabric local measures nothing of this model",
              "describe the machine instead (--fabric)", __FILE__, __LINE__);
}

}  // namespace weft
