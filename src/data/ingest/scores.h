// Scores of another table, as `weft score` writes it.
#pragma once

#include <string>
#include <vector>

#include "data/lists/lists.h"

namespace weft {

// Sets the facts of items that a table has, such as `ocr`. Rows are matched by the files that their
// paths lead to, whatever links lead there: relative ones begin in the table's folder. Returns how
// many items it has. Exit::data for a table without facts, and for two rows of one path that
// differ.
std::size_t join_scores(const std::string& table, const MediaDeck& limits,
                        std::vector<MediaItem>& items);

}  // namespace weft
