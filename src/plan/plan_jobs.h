// `weft plan DECK --job encode | generate`: memory of a rank by stage, and times where rates are known. Made from shapes and
// formulas; nothing is loaded and nothing is run.
#pragma once

#include <string>

#include "config/deck.h"
#include "plan/plan.h"

namespace weft {

// Prints the tables; `json`, if not empty, names a file for the same. Exit::usage for what does not fit, naming the largest
// that does.
int plan_job(const Deck& deck, const PlanRequest& request, const std::string& job,
             const std::string& json, int world_ranks);

}  // namespace weft
