#include "models/registry.h"

#include "core/error.h"
#include "models/dbnet/options.h"
#include "models/dbnet/task.h"
#include "models/sadtalker/options.h"
#include "models/segmentation/options.h"
#include "models/segmentation/task.h"
#include "models/stdit3/task.h"
#include "models/t5/options.h"
#include "models/video_vae/task.h"

namespace weft {
namespace {

template <class Task>
std::unique_ptr<TrainingTask> make(const Deck& deck) {
  return std::make_unique<Task>(deck);
}

std::vector<Model>& table() {
  static std::vector<Model> models = {
      {"stdit3", stdit3_tables, make<Stdit3Task>},
      {"vae", video_vae_tables, make<VaeTask>},
      {"segmentation", segmentation_tables, make<SegmentationTask>},
      {"dbnet", dbnet_tables, make<DbnetTask>},
      {"sadtalker", sadtalker_tables},
      {"", t5_tables},
  };
  return models;
}

}  // namespace

const std::vector<Model>& models() { return table(); }
void add_model(Model model) { table().push_back(std::move(model)); }

const Model* find_model(const std::string& name) {
  for (const Model& m : models())
    if (m.name == name && m.make_task) return &m;
  return nullptr;
}

std::unique_ptr<TrainingTask> make_task(const Deck& deck) {
  if (const Model* m = find_model(deck.model.name)) return m->make_task(deck);
  throw Error(
      Exit::usage, fmt::format("weft train has no task for model.name = \"{}\"", deck.model.name),
      "set model.name to \"stdit3\", \"vae\", \"segmentation\" or \"dbnet\"", __FILE__, __LINE__);
}

}  // namespace weft
