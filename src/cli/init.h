// `weft init`: writes a deck to start from.
#pragma once

#include "config/command.h"

namespace weft {

// The decks of inputs/, which the program has within it.
Command init_command();

}  // namespace weft
