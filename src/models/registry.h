// Which models there are: model.name -> what trains it.
#pragma once

#include <memory>

#include "config/deck.h"
#include "train/task.h"

namespace weft {

// The task that model.name asks for. `deck` outlives it.
std::unique_ptr<TrainingTask> make_task(const Deck& deck);

}  // namespace weft
