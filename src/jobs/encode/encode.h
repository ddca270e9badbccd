// `weft encode DECK`: a clip store of pixels becomes one of latents, with the captions' T5 features.
#pragma once

#include <mpi.h>

#include "config/command.h"

namespace weft {

// The table [encode] of the deck.
struct EncodeDeck {
  std::string output = "latents.h5";
  std::string latents = "moments";
  std::string dtype = "f16";
  bool text = true;
};
DeckTable encode_table();

// Collective. 0, or throws. What was encoded before it was stopped is kept in OUTPUT.parts and not made again.
int encode(const Deck& deck, MPI_Comm world);
Command encode_command();

}  // namespace weft
