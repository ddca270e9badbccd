// The rows of score.input that this job scores, and the files that they name. Of a folder, a glob
// and so on a table is made, with a row for each file.
#pragma once

#include <mpi.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "data/lists/table.h"
#include "jobs/score/score.h"
#include "jobs/score/score_job.h"

namespace weft {

struct ScoreRows {
  std::int64_t begin = 0, end = 0;  // of the table's rows, from 0
  std::string identity;             // of the table's file, "" where there is none
  std::string made;                 // the table that was made then
  std::vector<ScoreFile> files;     // different ones, in the order of their first rows
};

// Rows [begin, end) of `rows` that "K/N" stands for; "" for all. Exit::usage for anything else.
std::pair<std::int64_t, std::int64_t> shard_of(const std::string& shard, std::int64_t rows);

// Collective: rank 0 reads the table, or lists the files (data/lists/lists.h), for all, and names
// those that are not there.
ScoreRows read_rows(const Deck& deck, MPI_Comm world);

// The table whose rows are scored.
TableReader open_table(const ScoreDeck& deck, const ScoreRows& rows);
// The path, as in ScoreFile, of the file that a row names.
std::string path_of_row(const ScoreDeck& deck, const std::string& path);

}  // namespace weft
