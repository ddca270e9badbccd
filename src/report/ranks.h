// The report's sections on many ranks: where the time of each went, who was waited for, how the job scales, and a
// rank's memory against its plan.
#pragma once

#include <span>
#include <string>

#include "report/data.h"

namespace weft::report_page {

// All return "" for what the run does not tell. `named`: the title names the run.
std::string rank_bars(const Run& run, bool named);
std::string memory_against_plan(const Run& run, bool named);
// The curves of all results, efficiency against ranks, and their figures.
std::string scaling_curves(std::span<const Scaling> results);

}  // namespace weft::report_page
