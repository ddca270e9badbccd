// What shells and `man` are told about the command line, from the table of commands and the keys of
// decks.
#pragma once

#include <string>
#include <vector>

#include "config/command.h"

namespace weft {

// A script that completes weft's command line. `shell`: bash, zsh or fish.
std::string completion_script(const std::string& shell, const std::vector<Command>& commands);

// Pages for `man`: weft(1), and weft-deck(5) with every key.
std::string man_page(const std::vector<Command>& commands);
std::string deck_man_page();

// "0 done, 2 usage or deck, ...", on two lines.
std::string exit_codes_text();

}  // namespace weft
