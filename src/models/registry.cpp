#include "models/registry.h"

#include "core/error.h"
#include "models/stdit3/task.h"
#include "models/video_vae/task.h"

namespace weft {

std::unique_ptr<TrainingTask> make_task(const Deck& deck) {
  if (deck.model.name == "vae") return std::make_unique<VaeTask>(deck);
  WEFT_CHECK(
      deck.model.name == "stdit3", Exit::usage,
      "set model.name to \"stdit3\" or \"vae\"; the temporal VAE trains as a part of \"vae\"",
      "weft train has no task for model.name = \"{}\"", deck.model.name);
  return std::make_unique<Stdit3Task>(deck);
}

}  // namespace weft
