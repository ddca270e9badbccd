// What a job's results rest on, for the reference list of a paper: cite.bib.
#pragma once

#include <filesystem>
#include <string>

#include "config/deck.h"

namespace weft {

// Writes FOLDER/cite.bib in BibTeX: weft, and the models and methods that `command` uses with this
// deck. A WARN where it cannot; for one rank.
void write_citations(const Deck& deck, const std::string& command,
                     const std::filesystem::path& folder);

}  // namespace weft
