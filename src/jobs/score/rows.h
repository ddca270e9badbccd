// The rows of score.input that this job scores, and the files that they name.
#pragma once

#include <mpi.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "jobs/score/score.h"
#include "jobs/score/score_job.h"

namespace weft {

struct ScoreRows {
  std::int64_t begin = 0, end = 0;  // of the table's rows, from 0
  std::string identity;             // of the table's file
  std::vector<ScoreFile> files;     // different ones, in the order of their first rows
};

// Rows [begin, end) of `rows` that "K/N" stands for; "" for all. Exit::usage for anything else.
std::pair<std::int64_t, std::int64_t> shard_of(const std::string& shard, std::int64_t rows);

// Collective: rank 0 reads the table for all, as TableReader does.
ScoreRows read_rows(const ScoreDeck& deck, MPI_Comm world);

}  // namespace weft
