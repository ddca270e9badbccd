// `weft status --follow`: what happens to jobs, as lines, from the files that they write on
// whatever node.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "report/status.h"

namespace weft {

// The lines that are added to a file while it is read.
class FileTail {
 public:
  explicit FileTail(std::filesystem::path path) : path_(std::move(path)) {}
  // The whole lines since the last call; in the first one those of the file's end, of 256 KiB, and
  // so where the file has become shorter. None of a file that is not there.
  std::vector<std::string> take();
  // The next call is as the first.
  void rewind() { begun_ = false; }

 private:
  std::filesystem::path path_;
  std::uint64_t at_ = 0;  // bytes that were taken
  bool begun_ = false;
};

class Follower {
 public:
  // Follows these jobs, and those in the folders below.
  explicit Follower(std::vector<std::filesystem::path> paths)
      : paths_(std::move(paths)), waiting_(paths_.begin(), paths_.end()) {}

  // Whole lines of what is new since the last call: the state of a job when it changes; the steps
  // that a training's own log has (train.log_every), each held-out loss, warning and checkpoint;
  // how many items another job has made. A training that runs already begins with its warnings so
  // far and the last ten of those steps. Folders are searched for new jobs in one call of ten. A
  // job whose folder was removed has a line that says so, and is followed no longer. `now`: seconds
  // since 1970.
  std::string poll(double now);
  // The paths in which no job has begun yet.
  const std::set<std::filesystem::path>& waiting() const { return waiting_; }
  // Whether each path has had a job, and all of them have ended (finished, stopped or failed) or
  // were removed. One that is silent may have been killed, or may go on.
  bool ended() const;
  // Whether a job has ended as failed, or was gone before it had ended.
  bool failed() const;

 private:
  struct Followed {
    explicit Followed(KnownJob known);
    KnownJob job;
    std::string state;       // that was printed; empty: none yet
    std::int64_t done = -1;  // items or steps that were seen
    std::int64_t log_every = 1;
    std::string unprinted;   // line of the newest step, which the log has only if it is the last
    double started = 0;      // of the start that they belong to
    std::string checkpoint;  // that was printed
    std::vector<std::string> warnings;
    FileTail metrics, validation;
  };
  static bool has_ended(const KnownJob& job);
  // Stops following the jobs that are gone. Returns their lines.
  std::string drop_gone(double now);
  static std::string new_lines(Followed& f, double now);
  static std::string new_steps(Followed& f, bool first);

  std::vector<std::filesystem::path> paths_;
  std::set<std::filesystem::path> waiting_;
  std::map<std::filesystem::path, Followed> jobs_;
  int polls_ = 0;
  bool lost_any_ = false;  // a job that had failed, or had not ended
};

}  // namespace weft
