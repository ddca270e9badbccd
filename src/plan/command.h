// `weft plan DECK`: what the deck would take on a described machine, without running the model on it.
#pragma once

#include <mpi.h>

#include <string>

#include "config/command.h"
#include "plan/plan.h"

namespace weft {

struct PlanCommand {
  PlanRequest request;
  std::string json;           // file for everything that was found
  std::string job = "train";  // or encode, generate (plan/plan_jobs.h)
};

// Collective. Prints the tables on the first rank; 0, or throws Exit::usage for what does not fit.
int plan(const Deck& deck, const PlanCommand& command, MPI_Comm world);
Command plan_command();

}  // namespace weft
