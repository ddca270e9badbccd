// Curves of one run or several over one another, and what tells several runs apart: loss by time,
// speed against ranks.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "report/data.h"
#include "report/plot.h"

namespace weft::report_page {

// The legend of runs; nothing for one.
std::string run_legend(std::span<const Run> runs);

// One curve a run of some quantity, averaged into few enough points to draw.
constexpr std::size_t most_points = 800;
using Column = std::vector<double> Steps::*;
std::vector<Curve> plain_curves(std::span<const Run> runs, Column column, double scale);
bool has(std::span<const Run> runs, Column column);

// Sections, "" for what the runs do not tell.
std::string loss_over_time(std::span<const Run> runs);
// What a training reports beside its loss, of one run.
std::string loss_terms(std::span<const Run> runs);
std::string speed_of_runs(std::span<const Run> runs);

}  // namespace weft::report_page
