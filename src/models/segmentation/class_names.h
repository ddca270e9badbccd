// Names of classes, for people.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "config/deck.h"

namespace weft {

// One a line; or ADE20K's object150_info.csv, of whose column Name the first of the names that ";"
// separates counts. Empty lines at the end are left out. Exit::usage if it cannot be read.
std::vector<std::string> read_class_names(const std::filesystem::path& file,
                                          const MediaDeck& limits);

// model.num_classes names: of model.class_names if the deck has it, else those of the data; "class
// 17" where there is none.
std::vector<std::string> class_names(const Deck& deck,
                                     const std::vector<std::string>& of_data = {});

}  // namespace weft
