// The report of one or several runs: one self-contained HTML page with plots, facts and samples.
#pragma once

#include <span>
#include <string>

#include "report/data.h"

namespace weft::report_page {

// The page as HTML. Needs no network and no script to be read. Curves of several runs lie over
// one another, in the order given. `scaling` comes beside the results that the runs have themselves.
std::string make_page(std::span<const Run> runs, std::span<const Scaling> scaling = {});

}  // namespace weft::report_page
