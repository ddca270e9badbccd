#include "train/task.h"

#include "core/error.h"
#include "core/trace.h"
#include "train/stdit3_task.h"
#include "train/vae_task.h"

namespace weft {

std::unique_ptr<TrainingTask> make_task(const Deck& deck) {
  if (deck.model.name == "vae") return std::make_unique<VaeTask>(deck);
  WEFT_CHECK(
      deck.model.name == "stdit3", Exit::usage,
      "set model.name to \"stdit3\" or \"vae\"; the temporal VAE trains as a part of \"vae\"",
      "weft train has no task for model.name = \"{}\"", deck.model.name);
  return std::make_unique<Stdit3Task>(deck);
}

void run_parts(const TrainingWork& work, ParameterTable& params, float weight, bool counting,
               const std::function<void(const TrainingLoss&)>& on_loss) {
  for (std::size_t i = 0; i < work.parts.size(); ++i) {
    params.set_counting(counting && i + 1 == work.parts.size());
    Tape tape;
    TrainingLoss loss;
    {
      const trace::Scope traced("forward", trace::Lane::compute);
      loss = work.parts[i](tape, weight);
    }
    const trace::Scope traced("backward", trace::Lane::compute);
    tape.backward();
    on_loss(loss);
  }
}

}  // namespace weft
