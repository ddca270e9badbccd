// Names of classes, for people.
#pragma once

#include <string>
#include <vector>

#include "config/deck.h"

namespace weft {

// model.num_classes names: of the file model.class_names (data/ingest/ingest_images.h) if the deck
// has it, else those of the data; "class 17" where there is none. Exit::usage for a file of another
// number of names, Exit::data for one that cannot be read, and names that are not UTF-8.
std::vector<std::string> class_names(const Deck& deck,
                                     const std::vector<std::string>& of_data = {});

}  // namespace weft
