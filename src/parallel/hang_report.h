// What a hang looks like from all ranks: its cause in a line and a table, one line a rank.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "parallel/flight_record.h"

namespace weft {

// How far one rank is, as its watchdog's thread tells it.
struct RankState {
  bool answers = false;
  bool stalled = false;   // in a step, and nothing moved for the timeout
  std::int64_t step = 0;  // from 0, where there is a phase; people are told from 1
  std::string phase;      // empty: in no step
  double phase_seconds = 0;
  std::uint64_t issued = 0, begun = 0, completed = 0;
  std::vector<FlightRecord::Entry> records;

  std::vector<char> to_bytes() const;
  static RankState from_bytes(std::span<const char> bytes);  // answers
};

struct RankName {
  int rank = 0;
  std::string host;
};

// "COMPLAINT; late: rank 3 on n14 (has not issued it)", then the table. Where the records of ranks differ, that comes first.
// `complaint` is what the rank says that noticed, without a dot. States and names by rank.
std::string hang_report(const std::string& complaint, std::span<const RankState> states,
                        std::span<const RankName> names);

}  // namespace weft
