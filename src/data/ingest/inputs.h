// The list of videos that a deck's ingest.inputs expands to.
#pragma once

#include <string>
#include <vector>

#include "config/deck.h"
#include "media/media_source.h"

namespace weft {

struct IngestInput {
  MediaSource media;
  std::string text;  // the caption, "" = none
};

// The text of a list. Throws Exit::data if it is larger than limits.max_list_mib.
std::string read_list(const std::string& path, const MediaDeck& limits);

// RFC 4180: fields may be quoted, quotes are doubled inside, lines may break inside quotes. `path`
// is for messages.
struct CsvRow {
  std::size_t line = 1;
  std::vector<std::string> fields;
};
std::vector<CsvRow> parse_csv(const std::string& path, const std::string& text);

// Expands globs (sorted), .csv and .jsonl lists; everything else stays as it is. Order is kept. The
// entries of a list are not trusted: they may name only files. Throws Exit::data for a glob without
// a match and for a list that cannot be read, naming its line, or is larger than
// limits.max_list_mib.
std::vector<IngestInput> expand_inputs(const std::vector<std::string>& inputs,
                                       const MediaDeck& limits);

}  // namespace weft
