// `weft score DECK`: how much text is in the pictures and videos of a table, by a text detector
// (docs/score.md).
#pragma once

#include <mpi.h>

#include <functional>
#include <string>
#include <vector>

#include "config/command.h"
#include "jobs/score/summary.h"

namespace weft {

// The table [score] of the deck.
struct ScoreDeck {
  std::string input, output, weights;
  bool ema = false;
  std::vector<std::string> columns;
  std::int64_t frame = 10;
  std::vector<std::int64_t> frames;
  std::int64_t side = 1024;
  std::int64_t maximum = -1;
  std::string shard;
  std::int64_t pictures = 0;
  std::int64_t threads = 0;
};
DeckTable score_table();

// Makes the page of a scoring, as HTML.
using ScorePage = std::function<std::string(const ScoreSummary&)>;

// Collective. Writes the table score.output, a page beside it, and what is finished into
// OUTPUT.parts/. Returns the exit code: 0, 3 if files could not be read, 75 if asked to stop. The
// same command scores what is missing. `page` may be null: then there is none.
int score(const Deck& deck, const ScorePage& page, MPI_Comm world);
Command score_command(ScorePage page);

}  // namespace weft
