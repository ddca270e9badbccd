// What `weft help` says of keys.
#pragma once

#include <string>

namespace weft {

// As default_deck_with_help(), of a table ("train"), a key ("train.lr"), or a key of any table
// ("lr"). Exit::usage where there is none.
std::string deck_help(const std::string& name);
// Whether there is such a table or key.
bool names_deck_keys(const std::string& name);

}  // namespace weft
