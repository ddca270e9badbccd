// The doctor's verdict: from the facts of all ranks to findings, without examining the machine
// again.
#pragma once

#include <functional>
#include <map>
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

// In the order in which a person would look: versions, environment, placement, memory, GPUs,
// results, speed.
std::vector<Finding> judge(const std::vector<RankFacts>& ranks);

// hardware if any finding says so, else usage if any failed, else done.
Exit verdict(const std::vector<Finding>& findings);

// "rank 3", "ranks 0-3,8".
std::string ranks_text(const std::vector<int>& ranks);

// Ranks by value, the value of most ranks first.
using Groups = std::vector<std::pair<std::string, std::vector<int>>>;
Groups group_by(const std::vector<RankFacts>& ranks,
                const std::function<std::string(const RankFacts&)>& value);

}  // namespace weft

// What the parts of the verdict share, for judge*.cpp alone.
namespace weft::verdicts {

using Ranks = std::vector<RankFacts>;
using Findings = std::vector<Finding>;

inline void ok(Findings& f, std::string what) {
  f.push_back({Finding::Level::ok, std::move(what), "", Exit::done});
}
inline void warn(Findings& f, std::string what, std::string todo) {
  f.push_back({Finding::Level::warn, std::move(what), std::move(todo), Exit::done});
}
inline void fail(Findings& f, std::string what, std::string todo, Exit code = Exit::usage) {
  f.push_back({Finding::Level::fail, std::move(what), std::move(todo), code});
}

std::vector<int> ranks_with(const Ranks& ranks, const std::function<bool(const RankFacts&)>& is);

// Ranks of each host, in order.
std::map<std::string, std::vector<const RankFacts*>> by_host(const Ranks& ranks);

// "1.10.8 on ranks 0,2-3; 1.12.0 on rank 1"
std::string groups_text(const Groups& groups);

// The parts in judge_devices.cpp.
void judge_gpus(const Ranks& ranks, Findings& out);
void judge_operations(const Ranks& ranks, Findings& out);
void judge_results(const Ranks& ranks, Findings& out);
void judge_speed(const Ranks& ranks, Findings& out);

}  // namespace weft::verdicts
