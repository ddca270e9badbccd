#include "train/task.h"

#include <algorithm>

#include "core/error.h"
#include "core/trace.h"
#include "train/validation.h"

namespace weft {

std::unique_ptr<ValidationSet> TrainingTask::validation_set(const HeldOut&) {
  throw Error(Exit::usage, "this model has no validation", "leave [validation] out", __FILE__,
              __LINE__);
}

std::size_t run_parts(const TrainingWork& work, ParameterTable& params, bool counting,
                      const std::function<void(const TrainingLoss&)>& on_loss) {
  std::size_t kept = 0;
  for (std::size_t i = 0; i < work.parts.size(); ++i) {
    // Only the last part completes the gradients, so only its uses may release a bucket.
    const CountingScope counted(params, counting && i + 1 == work.parts.size());
    Tape tape;
    tape.allow(work.kept);
    TrainingLoss loss;
    {
      const trace::Scope traced("forward", trace::Lane::compute);
      loss = work.parts[i](tape);
    }
    const trace::Scope traced("backward", trace::Lane::compute);
    tape.backward();
    on_loss(loss);
    kept = std::max(kept, tape.kept());
  }
  return kept;
}

}  // namespace weft
