#include "models/registry.h"

#include <algorithm>
#include <initializer_list>

#include "core/error.h"
#include "models/clip/clip.h"
#include "models/dbnet/dbnet.h"
#include "models/dbnet/task.h"
#include "models/sadtalker/options.h"
#include "models/segmentation/options.h"
#include "models/segmentation/task.h"
#include "models/stdit3/stdit3.h"
#include "models/stdit3/task.h"
#include "models/t5/options.h"
#include "models/t5/text_encoder.h"
#include "models/video_vae/task.h"
#include "models/video_vae/video_vae.h"
#include "models/wan/dit.h"
#include "models/wan/options.h"
#include "models/wan/task.h"
#include "models/wan/vae.h"

namespace weft {
namespace {

template <class Task>
std::unique_ptr<TrainingTask> make(const Deck& deck) {
  return std::make_unique<Task>(deck);
}

std::unique_ptr<Denoiser> make_stdit3(const Deck& deck) {
  return std::make_unique<Stdit3>(stdit3_config(deck));
}
std::unique_ptr<Denoiser> make_wan(const Deck& deck) {
  const WanSamplerDeck& s = deck.get<WanSamplerDeck>();
  if (s.boundary > 0 || s.boundary_step > 0) return std::make_unique<WanExperts>(wan_config(deck));
  return std::make_unique<Wan>(wan_config(deck));
}
std::unique_ptr<VideoCodec> make_video_vae(const Deck& deck) {
  return std::make_unique<VideoVae>(deck.get<VaeDeck>());
}
std::unique_ptr<VideoCodec> make_wan_vae(const Deck& deck) {
  return std::make_unique<WanVae>(deck.get<WanVaeDeck>());
}
// A T5 by its table of the deck.
template <class Table>
const T5Deck& t5_of(const Deck& deck) {
  return deck.get<Table>();
}
template <class Table>
std::unique_ptr<TextEncoder> make_t5(const Deck& deck) {
  return std::make_unique<T5TextEncoder>(deck.get<Table>());
}

std::vector<DeckTable> joined(std::initializer_list<std::vector<DeckTable>> parts) {
  std::vector<DeckTable> tables;
  for (const auto& part : parts) tables.insert(tables.end(), part.begin(), part.end());
  return tables;
}
std::vector<DeckTable> tables_of_wan() {
  return joined({wan_tables(), wan_vae_tables(), umt5_tables()});
}
std::vector<DeckTable> tables_of_wan_vae() { return joined({wan_vae_tables(), umt5_tables()}); }

std::vector<Model>& table() {
  static std::vector<Model> models = {
      {"stdit3", stdit3_tables, make<Stdit3Task>, make_stdit3, make_video_vae, make_t5<T5Deck>,
       t5_of<T5Deck>},
      {"vae", video_vae_tables, make<VaeTask>, nullptr, make_video_vae, make_t5<T5Deck>,
       t5_of<T5Deck>},
      {"segmentation", segmentation_tables, make<SegmentationTask>},
      {"dbnet", dbnet_tables, make<DbnetTask>},
      {"sadtalker", sadtalker_tables},
      {"", t5_tables},
      {"", clip_tables},
      {"wan", tables_of_wan, make<WanTask>, make_wan, make_wan_vae, make_t5<UmT5Deck>,
       t5_of<UmT5Deck>},
      {"wan_vae", tables_of_wan_vae, nullptr, nullptr, make_wan_vae, make_t5<UmT5Deck>,
       t5_of<UmT5Deck>},
      {"umt5", umt5_tables, nullptr, nullptr, nullptr, make_t5<UmT5Deck>, t5_of<UmT5Deck>},
  };
  return models;
}

const Model* model_named(const std::string& name) {
  for (const Model& m : table())
    if (m.name == name) return &m;
  return nullptr;
}

// The model that model.name asks for. Exit::usage where it lacks what `has` wants, `part`.
const Model& model_with(const Deck& deck, const char* part, bool (*has)(const Model&)) {
  const Model* named = model_named(deck.model.name);
  if (named != nullptr && has(*named)) return *named;
  std::vector<std::string> names;
  for (const Model& m : table())
    if (!m.name.empty() && has(m)) names.push_back(m.name);
  throw Error(Exit::usage, fmt::format("model.name = \"{}\" has no {}", deck.model.name, part),
              fmt::format("set model.name to one of: {}", fmt::join(names, ", ")), __FILE__,
              __LINE__);
}

}  // namespace

const std::vector<Model>& models() { return table(); }
void add_model(Model model) { table().push_back(std::move(model)); }

std::vector<DeckTable> model_tables() {
  std::vector<DeckTable> tables;
  for (const Model& m : models()) {
    if (m.tables == nullptr) continue;
    for (DeckTable& t : m.tables()) {
      if (!m.name.empty()) t.models = {m.name};
      tables.push_back(std::move(t));
    }
  }
  return tables;
}

std::vector<std::string> model_names() {
  std::vector<std::string> names;
  for (const Model& m : models())
    if (!m.name.empty()) names.push_back(m.name);
  return names;
}

const Model* find_model(const std::string& name) {
  const Model* m = model_named(name);
  return m != nullptr && m->make_task ? m : nullptr;
}

std::unique_ptr<TrainingTask> make_task(const Deck& deck) {
  if (const Model* m = find_model(deck.model.name)) return m->make_task(deck);
  throw Error(Exit::usage,
              fmt::format("weft train has no task for model.name = \"{}\"", deck.model.name),
              fmt::format("set model.name to one of: {}", trained_models()), __FILE__, __LINE__);
}

std::string trained_models() {
  std::vector<std::string> names;
  for (const Model& m : table())
    if (!m.name.empty() && m.make_task) names.push_back(m.name);
  return fmt::format("{}", fmt::join(names, ", "));
}

std::unique_ptr<Denoiser> make_denoiser(const Deck& deck) {
  return model_with(deck, "denoiser, which makes clips",
                    [](const Model& m) { return m.make_denoiser != nullptr; })
      .make_denoiser(deck);
}

std::unique_ptr<VideoCodec> make_codec(const Deck& deck) {
  return model_with(deck, "VAE", [](const Model& m) { return m.make_codec != nullptr; })
      .make_codec(deck);
}

std::unique_ptr<TextEncoder> make_text_encoder(const Deck& deck) {
  const Model& m = model_with(deck, "part that clips or captions go through", [](const Model& of) {
    return of.make_denoiser != nullptr || of.make_codec != nullptr ||
           of.make_text_encoder != nullptr;
  });
  return m.make_text_encoder != nullptr ? m.make_text_encoder(deck) : nullptr;
}

const T5Deck& t5_deck(const Deck& deck) {
  return model_with(deck, "T5", [](const Model& m) { return m.t5 != nullptr; }).t5(deck);
}

}  // namespace weft
