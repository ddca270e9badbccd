// CLIP's table of the deck: [clip].
#pragma once

#include <vector>

#include "config/deck.h"

namespace weft {

// Shapes are not in the deck: they follow from the weights (models/clip/clip.h).
struct ClipDeck {
  std::string weights;
  std::string merges;
  std::string aesthetic;
};

std::vector<DeckTable> clip_tables();

}  // namespace weft
