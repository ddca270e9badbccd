// The end of `weft score`: the table that it writes, from the lines of finished files.
#pragma once

#include <array>
#include <filesystem>
#include <string_view>

#include "jobs/engine/list_job.h"
#include "jobs/score/rows.h"
#include "jobs/score/summary.h"

namespace weft {

// What score.columns may name; the columns are ocr_area and so on.
inline constexpr std::array<std::string_view, 4> extra_columns = {"area", "boxes", "scores",
                                                                  "fault"};

std::filesystem::path parts_folder(const ScoreDeck& deck);  // OUTPUT.parts
std::filesystem::path page_file(const ScoreDeck& deck);     // OUTPUT.html

// The times of all ranks; if this start scored nothing, of the one that wrote the report.
void add_feeds(const ListReport& report, const std::filesystem::path& file, PrefetchSummary& feed);

// On rank 0. Reads the table again, row by row, and writes each with its result; the
// output is renamed once it is whole. Fills in what the summary says of rows and files. Exit::data
// if the table has changed since it was read.
void write_output(const Deck& deck, const ScoreRows& rows, const ListEngine& engine,
                  const ListReport& report, ScoreSummary& summary);

}  // namespace weft
