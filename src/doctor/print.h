// The doctor's report for people: tables of every rank, then one line a finding.
#pragma once

#include "doctor/judge.h"

namespace weft {

// To stdout.
void print_report(const std::vector<RankFacts>& ranks, const std::vector<Finding>& findings);

// The same for machines.
nlohmann::json report_json(const std::vector<RankFacts>& ranks,
                           const std::vector<Finding>& findings);

}  // namespace weft
