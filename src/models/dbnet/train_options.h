// The keys of [train] that belong to the text detector alone.
#pragma once

#include "config/deck_table.h"

namespace weft {

struct DbnetTrainDeck {
  double lr_detector = 0.007;
};
DeckTable dbnet_train_table();

}  // namespace weft
