// `weft evaluate DECK`: how well a segmentation model classifies the pixels of labelled images.
#pragma once

#include <mpi.h>

#include <functional>

#include "config/command.h"
#include "jobs/evaluate/evaluation.h"

namespace weft {

// The table [evaluate] of the deck.
struct EvaluateDeck {
  std::string data;
  std::string output = "evaluation";
  std::int64_t pictures = 12;
  bool predictions = false;
  bool ema = false;
};
DeckTable evaluate_table();

// Makes the page of an evaluation, as HTML.
using EvaluationPage = std::function<std::string(const Evaluation&)>;

// Collective. Writes OUTPUT/evaluation.json, .txt and .html once all images are evaluated. Returns
// the exit code: 0, 3 if images failed, 75 if asked to stop. The same command evaluates what is
// missing. `page` may be null: then there is none.
int evaluate(const Deck& deck, const EvaluationPage& page, MPI_Comm world);
Command evaluate_command(EvaluationPage page);

}  // namespace weft
