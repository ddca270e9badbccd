// What editors and `weft help` are told about the names in a deck.
#pragma once

#include <string>

namespace weft {

// A JSON Schema (draft 4, which Taplo and other editors' plugins read) of every table and key, with
// types, ranges, values, defaults and help; other names are refused: `weft help schema`.
std::string deck_schema();

// The table, or the key with its table, that is nearest to such a name; "" if none is near.
std::string nearest_key(const std::string& name);

}  // namespace weft
