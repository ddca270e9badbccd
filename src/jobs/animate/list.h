// The clips that a job makes: rows of animate.input, or the one pair of the deck.
#pragma once

#include <mpi.h>

#include <cstdint>
#include <string>
#include <vector>

#include "config/deck.h"
#include "jobs/animate/options.h"
#include "models/sadtalker/options.h"

namespace weft {

// What a clip is made of and with: the deck's keys, with those that its row sets.
struct ClipRequest {
  std::string name;   // of its file, without .mp4: unique in the job
  std::string where;  // "clips.csv, line 3", or "the deck"
  AnimateDeck animate;
  SadtalkerDeck sadtalker;
};

// Columns of a list, each the key of a deck that it sets.
struct ListColumn {
  const char* name;
  const char* key;
};
const std::vector<ListColumn>& list_columns();

// Collective: rank 0 reads the list for all. Exit::data, naming file and line, for a list that
// cannot be read, an unknown column (with the nearest known one), a value that the deck would
// refuse (Exit::usage), a row without picture or speech, a name that is taken or is no plain file
// name, and where no clip has all its files. Paths of a list begin in its folder. Exit::usage for a
// deck that asks for nothing, or whose results would replace an input.
std::vector<ClipRequest> list_clips(const Deck& deck, MPI_Comm world);

}  // namespace weft
