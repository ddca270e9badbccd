// What the status file of a job says, for those who write it and those who read it.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace weft {

struct JobStatus {
  std::string command, noun;                     // "generate" makes "clip"s
  std::string state = "running";                 // finished, stopped (exit code 75) or failed
  std::string error;                             // why it failed
  std::int64_t done = 0, total = 0, before = 0;  // items; `before`: by earlier starts, part of done
  double rate = 0, left = 0;                     // items a second; seconds; 0: unknown
  int ranks = 1, code = 0;
  std::string host;
  double started = 0, updated = 0, advanced = 0;  // seconds since 1970; advanced: the last item
  std::vector<std::pair<std::string, double>> values;  // the loss and the like
  std::vector<std::string> warnings;                   // the last of rank 0
};
std::string to_text(const JobStatus& status);
// Nothing for a file that is not there, is damaged or is no status.
std::optional<JobStatus> read_status(const std::filesystem::path& file);

// "41 s", "3 min 20 s", "5 h 02 min", "2 d 4 h".
std::string duration_text(double seconds);

}  // namespace weft
