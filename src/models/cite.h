// What a job's results rest on, for the reference list of a paper: cite.bib.
#pragma once

#include <set>
#include <string>

#include "config/deck.h"

namespace weft {

// In BibTeX: weft, and the models and methods that `command` uses with this deck; `texts`: if it
// encodes any.
std::string citations(const Deck& deck, const std::string& command, bool texts = true);
// Weft, and those of the entries that `used` has the key of.
std::string citations(const std::string& command, const std::set<std::string>& used);

}  // namespace weft
