// `weft segment DECK`: classes of the pixels of pictures and videos, drawn beside or over them.
#pragma once

#include <mpi.h>

#include "config/command.h"

namespace weft {

// The table [segment] of the deck.
struct SegmentDeck {
  std::vector<std::string> inputs;
  std::string output = "segmented";
  std::string overlay = "side_by_side";
  bool ema = false;
};
DeckTable segment_table();

// Collective. Writes a PNG for each picture and an MP4 for each video, and OUTPUT/segment.jsonl.
// Returns the exit code: 0, 3 if inputs failed, 75 if asked to stop. The same command makes what is
// missing.
int segment(const Deck& deck, MPI_Comm world);
Command segment_command();

}  // namespace weft
