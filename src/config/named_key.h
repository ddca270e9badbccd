// Messages that tell where a wrong value comes from.
#pragma once

#include <string>
#include <string_view>

#include "config/deck.h"

namespace weft {

// The key of the deck whose text `message` has as a word of its own, such as the path that cannot
// be opened; "" if there is none. Of several values the longest counts. A
// default is not looked for, which nobody has written.
std::string key_of_value(const Deck& deck, std::string_view message);

}  // namespace weft
