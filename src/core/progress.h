// How far a job is: on a terminal one line that is redrawn, in a log a line every ten seconds, and
// a status file, from which `weft status` reports while the job runs and afterwards. What it took:
// the last lines of its log, and a summary beside the status.
#pragma once

#include <cstdint>
#include <deque>
#include <filesystem>
#include <memory>
#include <nlohmann/json_fwd.hpp>
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

// All wall time of this process belongs to a part: from its start on to "start", and from this call
// on to `part`, which may have begun before. For the main thread.
void begin_part(const std::string& part);
// The same while it lives; afterwards time counts to the part before again.
class WallPart {
 public:
  explicit WallPart(const std::string& part);
  ~WallPart() { begin_part(before_); }
  WallPart(const WallPart&) = delete;
  WallPart& operator=(const WallPart&) = delete;

 private:
  std::string before_;
};
// Seconds of each part until now, in the order in which they began.
std::vector<std::pair<std::string, double>> wall_parts();

// What this start of a job made, for its summary.
struct JobWork {
  std::string unit;    // "clip"
  double items = 0;    // of them
  double seconds = 0;  // that they took; what was left out of both is in neither
  std::string note;    // how they were counted: "27 steps, without the first 3"; may be empty
  double flops = 0;    // counted operations of all ranks; 0: not counted
  double limit = 0;    // FLOP/s of matrix products on all ranks, measured; 0: not measured
  bool on_gpu = false;
  int threads = 1;                 // of a rank
  std::vector<std::string> hosts;  // [rank]
  // [rank] What `seconds` went to. The rest is "other".
  std::vector<std::pair<std::string, std::vector<double>>> parts;
};
// SUMMARY.json (docs/file_formats.md) of a job whose time is `wall`, and its lines in a log, each
// of a label and a text. Fields that are missing or are of another type have no line.
nlohmann::ordered_json summary_json(const std::string& command, const JobWork& work,
                                    const std::vector<std::pair<std::string, double>>& wall);
std::vector<std::pair<std::string, std::string>> summary_lines(
    const nlohmann::ordered_json& summary);
// Of the job with that status file, as its last start ended; null where there is none, or it is
// damaged.
nlohmann::ordered_json read_summary(const std::filesystem::path& status);

class Progress {
 public:
  struct State;
  struct Job {
    std::filesystem::path file;  // of the status; empty: none
    std::string command, noun;
    std::string label;  // begins each line; empty: no lines in a log
    std::int64_t total = 0, before = 0;
    int rank = 0, ranks = 1;
    std::string cite;  // text of the cite.bib beside the status; empty: none
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
  // What end() is to log and to write beside the status, on rank 0.
  void set_work(JobWork work);
  // The job ends with this exit code. From any rank: with failed ranks another than 0 concludes.
  void end(int code, std::int64_t done, const std::string& error = "");

 private:
  std::shared_ptr<State> state_;
};

// For main and for those who end the job: the job of this process, if it has not ended, failed.
void note_failure(const Error& e);

}  // namespace weft
