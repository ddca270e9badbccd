// The page of `weft score`: how many rows have how much text, what bounded the job, files with
// faults, and some frames with their boxes.
#pragma once

#include <string>

#include "jobs/score/summary.h"

namespace weft::report_page {

// HTML that needs no other file: pictures that are not too large are in it, others are named.
std::string score_page(const ScoreSummary& summary);

}  // namespace weft::report_page
