// The commands `weft plan` and `weft simulate`.
#pragma once

#include <mpi.h>

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "config/command.h"
#include "plan/plan.h"

namespace weft {

// `weft plan DECK`: what the deck would take on a described machine, without running the model on
// it.
struct PlanCommand {
  PlanRequest request;
  std::string json;           // file for everything that was found
  std::string job = "train";  // or encode, generate, animate
};

// Collective. Prints the tables on the first rank; 0, or throws Exit::usage for what does not fit.
int plan(const Deck& deck, const PlanCommand& command, MPI_Comm world);
Command plan_command();

// `weft plan DECK --job encode | generate | animate`: memory of a rank by stage, and times where
// rates are known. Made from shapes and formulas; nothing is loaded and nothing is run. Prints the
// tables; `json`, if not empty, names a file for the same. Exit::usage for what does not fit,
// naming the largest that does.
int plan_job(const Deck& deck, const PlanRequest& request, const std::string& job,
             const std::string& json, int world_ranks);

// The part of animate: adds what it finds to `j`. Reads the list, its pictures and speeches, and
// draws networks of the deck's shapes.
void plan_animate(const Deck& deck, const PlanRequest& request, int ranks,
                  nlohmann::ordered_json& j);

// `weft simulate DECK`: the deck's step plan and bucket schedule played on many ranks of a
// described machine.
struct SimulateRequest {
  std::vector<int> gpus = {1, 2, 4, 8, 16, 32, 64, 128};
  std::vector<std::string> fabrics = {default_fabric}, styles = {"weft"};
  double memory_gb = 141;  // of a GPU: decides what is recomputed
  std::int64_t per_gpu =
      0;  // micro-batches a rank and step; 0: the deck's train.micro_batches, shared by all
  std::string costs,
      rates;      // measured ones (plan/simulation_job.h, plan/step_model.h); empty: predicted
  int cores = 0;  // of the host, for --fabric local; 0: those of this one
  double link_rate = 2;  // GB/s between its ranks, as weft bench comm measures them
  int steps = 20, warmup = 2;
  double variation = 0.01;
  double barrier_tflops = 130;
  std::string json, plot;
};

// Prints a table per fabric and style, writes JSON and SVG as asked. Returns 0; throws Exit::usage
// for what cannot be done.
int simulate(const Deck& deck, const SimulateRequest& request);
Command simulate_command();

}  // namespace weft
