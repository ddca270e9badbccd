// What the parts of the doctor's verdict share; for doctor_judge*.cpp alone.
#pragma once

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "doctor/judge.h"

namespace weft::doctor {

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

// The parts in doctor_judge_devices.cpp.
void judge_gpus(const Ranks& ranks, Findings& out);
void judge_results(const Ranks& ranks, Findings& out);
void judge_speed(const Ranks& ranks, Findings& out);

}  // namespace weft::doctor
