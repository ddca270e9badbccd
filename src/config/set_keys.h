// Keys of a deck that is already read, as rows of a list set them.
#pragma once

#include <span>
#include <string>
#include <utility>

#include "config/deck.h"

namespace weft {

// Sets keys from (key, value) as the command line writes them. `origin` names them in messages.
// Values are checked alone, not with those of other keys. Exit::usage.
void set_keys(Deck& deck, std::span<const std::pair<std::string, std::string>> values,
              const std::string& origin);

}  // namespace weft
