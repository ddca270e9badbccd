// How far a job is: on a terminal one line that is redrawn, in a log a line every ten seconds, and
// a status file, from which `weft status` reports while the job runs and afterwards.
#pragma once

#include <cstdint>
#include <deque>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/error.h"

namespace weft {

// What the status file says.
struct JobStatus {
  std::string command, noun;      // "generate" makes "clip"s
  std::string state = "running";  // finished, stopped (exit code 75) or failed
  std::string error;              // why it failed, or why it is finished before its total
  std::int64_t done = 0, total = 0, before = 0;  // items; `before`: by earlier starts, part of done
  double rate = 0, left = 0;                     // items a second; seconds; 0: unknown
  int ranks = 1, code = 0;
  std::string host;  // the writer's, and its process there; 0: not known
  std::int64_t pid = 0;
  double started = 0, updated = 0, advanced = 0;  // seconds since 1970; advanced: the last item
  std::vector<std::pair<std::string, double>> values;  // the loss and the like
  std::vector<std::string> warnings;                   // the last of rank 0
  // Warnings of earlier starts: the last of each kind, and how many there were.
  std::vector<std::pair<std::string, std::int64_t>> earlier_warnings;
};
std::string to_text(const JobStatus& status);
// Nothing for a file that is not there, is damaged or is no status.
std::optional<JobStatus> read_status(const std::filesystem::path& file);

// "41 s", "3 min 20 s", "5 h 02 min", "2 d 4 h".
std::string duration_text(double seconds);

// Work a second over the last minutes, since a job may become faster or slower.
class WorkRate {
 public:
  // `work` that is done since some moment, at `now` on a clock of seconds.
  void add(double now, double work);
  double per_second() const;  // 0: unknown

 private:
  std::deque<std::pair<double, double>> seen_;
};

class Progress {
 public:
  struct State;
  struct Job {
    std::filesystem::path file;  // of the status; empty: none
    std::string command, noun;
    std::string label;  // begins each line; empty: no lines in a log
    std::int64_t total = 0, before = 0;
    int rank = 0, ranks = 1;
  };
  // One at a time in a process. All ranks may have one, so that whichever fails can say so;
  // only rank 0's reports the job.
  explicit Progress(Job job);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  // `done` of the job's items. `work` of `all`: in a unit that takes equal time, counted from this
  // start. Cheap: shown only when it is time. Thread-safe.
  using Values = std::vector<std::pair<std::string, double>>;
  void advance(std::int64_t done, double work, double all, const Values& values = {});
  // ", 3 min 20 s left", or "" while that is unknown.
  std::string left_text() const;
  // The work is done: what follows is told without the line.
  void hide();
  // The job ends with this exit code. From any rank: with failed ranks another than 0 concludes.
  void end(int code, std::int64_t done, const std::string& error = "");

 private:
  std::shared_ptr<State> state_;
};

// For main and for those who end the job: the job of this process, if it has not ended, failed.
void note_failure(const Error& e);

}  // namespace weft
