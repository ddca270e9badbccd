// The doctor's verdict: from the facts of all ranks to findings, without looking at the machine again.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "core/error.h"
#include "doctor/facts.h"

namespace weft {

struct Finding {
  enum class Level { ok, warn, fail };
  Level level = Level::ok;
  std::string what;        // with the ranks it is about
  std::string todo;        // "" for ok
  Exit code = Exit::done;  // of a failure: usage (to be mended) or hardware
};

// In the order in which a person would look: versions, environment, placement, memory, GPUs, results, speed.
std::vector<Finding> judge(const std::vector<RankFacts>& ranks);

// hardware if any finding says so, else usage if any failed, else done.
Exit verdict(const std::vector<Finding>& findings);

// "rank 3", "ranks 0-3,8".
std::string ranks_text(const std::vector<int>& ranks);

// Ranks by value, the value of most ranks first.
using Groups = std::vector<std::pair<std::string, std::vector<int>>>;
Groups group_by(const std::vector<RankFacts>& ranks,
                const std::function<std::string(const RankFacts&)>& value);

double median_of(std::vector<double> values);

}  // namespace weft
