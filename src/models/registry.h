// The table of models: what a model brings to the deck, and its parts by role. A new model is a
// folder beside the others and a line in registry.cpp.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "config/deck_table.h"
#include "models/interfaces.h"
#include "train/task.h"

namespace weft {

struct T5Deck;  // models/t5/options.h

struct Model {
  std::string name;  // model.name; empty: no deck names it
  // A table that stands in for another model's of the same section (DeckTable::models) comes after
  // that in the list of models.
  std::vector<DeckTable> (*tables)() = nullptr;
  TaskFactory make_task = nullptr;  // null: it does not train by itself
  // Its other roles (models/interfaces.h); null: the model lacks that part.
  std::unique_ptr<Denoiser> (*make_denoiser)(const Deck& deck) = nullptr;
  std::unique_ptr<VideoCodec> (*make_codec)(const Deck& deck) = nullptr;
  std::unique_ptr<TextEncoder> (*make_text_encoder)(const Deck& deck) = nullptr;
  const T5Deck& (*t5)(const Deck& deck) = nullptr;  // the table of that encoder, where it is a T5
};

// The models of registry.cpp and those added.
const std::vector<Model>& models();
void add_model(Model model);
// For set_deck_tables(): their tables, each with the model that lists it, and the values of
// model.name.
std::vector<DeckTable> model_tables();
std::vector<std::string> model_names();

// The model of that name that trains by itself; null if there is none.
const Model* find_model(const std::string& name);
// The names of all such models, for hints.
std::string trained_models();
// The task that model.name asks for. `deck` outlives it.
std::unique_ptr<TrainingTask> make_task(const Deck& deck);
// The parts of the model that model.name asks for; Exit::usage, with the models that have such a
// part, where it has none. The text encoder is null where model.name makes or codes clips without
// one.
std::unique_ptr<Denoiser> make_denoiser(const Deck& deck);
std::unique_ptr<VideoCodec> make_codec(const Deck& deck);
std::unique_ptr<TextEncoder> make_text_encoder(const Deck& deck);
// The table [t5] of that text encoder, for what is about T5 by its nature (weft text, plan);
// Exit::usage where it is another kind of encoder, or none.
const T5Deck& t5_deck(const Deck& deck);

}  // namespace weft
