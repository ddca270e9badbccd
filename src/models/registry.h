// The table of models: what a model brings to the deck, to training and to planning. A new model is
// a folder beside the others and a line in registry.cpp.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "config/deck_table.h"
#include "train/task.h"

namespace weft {

struct Model {
  std::string name;  // model.name; empty: no deck names it
  std::vector<DeckTable> (*tables)() = nullptr;
  TaskFactory make_task = nullptr;  // null: it does not train by itself
};

// The models of registry.cpp and those added.
const std::vector<Model>& models();
void add_model(Model model);

// The model of that name that trains by itself; null if there is none.
const Model* find_model(const std::string& name);
// The task that model.name asks for. `deck` outlives it.
std::unique_ptr<TrainingTask> make_task(const Deck& deck);

}  // namespace weft
