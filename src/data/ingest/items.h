// What an ingest of footage works through: lists, files, folders and WebDataset shards, item by
// item.
#pragma once

#include <string>
#include <vector>

#include "config/deck.h"
#include "data/ingest/inputs.h"

namespace weft {

enum class MediumKind { other, video, picture };
// By the ending of a file's name.
MediumKind kind_of_name(const std::string& name);

// Expands ingest.inputs: what expand_inputs gives, and of that what the deck names (not a list)
//   a folder: the videos and pictures in it and below, sorted by path;
//   NAME.tar: the samples of a WebDataset shard (data/ingest/shards.h).
// A file that the deck names, or that lies in such a folder, has the text of NAME.txt beside it as
// its caption. Throws Exit::data.
std::vector<IngestInput> list_items(const std::vector<std::string>& inputs,
                                    const MediaDeck& limits);

// Sets the facts of items that a table has, such as the `ocr` of weft score. Rows are matched by
// path: relative ones begin where weft was started, as those of weft score do, or else in the
// table's folder. Returns how many items it has. Throws Exit::data for a table without facts, and
// for two rows of one path that differ.
std::size_t join_scores(const std::string& table, const MediaDeck& limits,
                        std::vector<IngestInput>& items);

// A caption from a file or from a member of a shard: without white space at its end.
std::string trimmed_caption(std::string text);
inline constexpr std::uint64_t longest_caption = std::uint64_t{1} << 20;

}  // namespace weft
