// The decks of inputs/ within the program: tools/input_decks.cmake writes the source.
#pragma once

#include <string>
#include <vector>

namespace weft {

struct InputDeck {
  std::string name, text;  // "smoke"; the file as it is
};

const std::vector<InputDeck>& input_decks();

}  // namespace weft
