// Jobs that read a table of files and write it again with columns of their own: what `weft score`
// and `weft evaluate` have in common beside data/lists/table.h.
#pragma once

#include <string>
#include <vector>

#include "data/lists/lists.h"
#include "data/lists/table.h"

namespace weft {

// Whether a key of a deck names a table by its ending, and no folder, glob, shard or file.
bool names_a_table(const std::string& input);

// A table of files that are listed in none: a row for each, with `path` and, where any has one,
// `text`. Exit::data for a name that is not UTF-8.
std::string table_of_files(const std::vector<MediaItem>& items, TableForm form);

// Whether a table that is written lies in another folder than that in which the paths of `input`
// begin: then they are written as absolute ones, which lead to the same files.
bool paths_have_moved(const std::string& input, const std::string& output);
// Such a path; empty ones and sources of FFmpeg stay.
std::string moved_path(const std::string& path);

// The name of a file as an item's (jobs/engine/list_job.h): unique for each path, valid UTF-8
// without control characters.
std::string item_name(const std::string& path);

}  // namespace weft
