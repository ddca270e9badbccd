// `weft report RUN...`: one self-contained HTML page with plots, facts and samples of runs.
#pragma once

#include <string>
#include <vector>

namespace weft {

// Writes report.html into the first run's directory and prints its path to stdout. Several runs
// share the page, their curves overlaid. Returns 0; throws Exit::data when a run has no metrics or
// the page cannot be written.
int report(const std::vector<std::string>& run_dirs);

}  // namespace weft
