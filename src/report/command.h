// `weft report RUN... [SCALING.json...]`: one self-contained HTML page with plots, facts and samples of runs.
#pragma once

#include <string>
#include <vector>

#include "config/command.h"

namespace weft {

// Writes report.html into the first run's directory and prints its path to stdout. Several runs
// share the page, their curves overlaid; inputs that end in .json are results of weft bench scaling.
// Returns 0; throws Exit::data when a run has no metrics, a result no points, or the page cannot be
// written, Exit::usage without a run.
int report(const std::vector<std::string>& inputs);
Command report_command();

}  // namespace weft
