// The list of videos that a deck's ingest.inputs stands for.
#pragma once

#include <string>
#include <vector>

namespace weft {

struct IngestInput {
  std::string path, text;  // text: the caption, "" = none
};

// Expands globs (sorted), .csv and .jsonl lists; everything else stays as it is. Order is kept.
// Throws Exit::data for a glob without a match and a list that cannot be read, naming its line.
std::vector<IngestInput> expand_inputs(const std::vector<std::string>& inputs);

}  // namespace weft
