// `weft status [PATH...]`: how far jobs are, from their files alone; for running and finished ones.
#pragma once

#include <cstdint>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "config/command.h"
#include "core/progress.h"

namespace weft {

struct KnownJob {
  std::filesystem::path path;  // the run directory, or the file that the job writes
  JobStatus status;            // `state` may be "silent" too: it says it runs, and writes no more
  std::string checkpoint{};    // the newest of a training run
  nlohmann::ordered_json summary{};  // core/progress.h, of the start that made something last
};

// A job whose status in that folder was read before.
inline KnownJob known(const std::filesystem::path& folder, const JobStatus& status) {
  return {folder, status, "", read_summary(folder / "status.json")};
}

// The job of a run directory, of a folder of results or of a file that a job writes; nothing if
// `path` has none. `now`: seconds since 1970.
std::optional<KnownJob> find_job(const std::filesystem::path& path, double now);
// That job, or all jobs in the folders below, by path, which is normal and ends with no slash.
std::vector<KnownJob> find_jobs(const std::filesystem::path& path, double now);

// All that is known of one job, and a table with a line for each of several.
std::string describe_job(const KnownJob& job, double now);
std::string table_of_jobs(const std::vector<KnownJob>& jobs, double now);
nlohmann::ordered_json json_of(const KnownJob& job, double now);
std::string jobs_as_json(const std::vector<KnownJob>& jobs, double now);

// Local time, "2026-11-24 10:00:12"; "-" where it is unknown.
std::string time_text(double seconds_since_1970);
double seconds_since_1970();

Command status_command();

}  // namespace weft
