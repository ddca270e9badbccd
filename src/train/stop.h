// External requests to a run: stop, save, write the trace. They arrive as signals
// (stop_signals of core/faults.h), as files in the run directory, and from the approaching end of
// the job. The step loop makes all ranks agree on them.
#pragma once

#include <array>
#include <filesystem>
#include <optional>
#include <string>

namespace weft {

// Installs the handlers, but for a SIGHUP that is ignored, on a thread of their own: call it before
// starting any thread that computes. A second SIGTERM or SIGINT ends the process at once with 64 +
// signal; the last checkpoint stays as it is.
void watch_stop_signals();
// The first signal received, 0 if none.
int stop_signal();

// Bits of a request.
namespace request {
constexpr unsigned stop = 1, save = 2, dump_trace = 4;
// What a rank reports beside its requests: its save is still being written.
constexpr unsigned saving = 8;
}  // namespace request

class Requests {
 public:
  // `margin_seconds`, `max_hours`: as run.stop_margin and run.max_hours. Reads SLURM_JOB_END_TIME
  // (seconds since the epoch) and PBS_WALLTIME (seconds, taken from the start of the program on);
  // Exit::usage if one of them is no time. Rank 0 removes RUN/stopped, which the run before left.
  Requests(std::filesystem::path run_dir, double margin_seconds, double max_hours = 0);

  // Requests to this rank since the last call; `stop` stays. Every rank checks its own signals;
  // rank 0 also checks the clock and the files RUN/stop, RUN/save, RUN/dump_trace. It
  // removes those it has seen; RUN/stop becomes RUN/stopped, which tells a job script not to submit
  // again. Cheap enough for every step: files are checked every half second at most. Logs one line
  // for each request and its origin. `longest_step` and `save_seconds`: how much earlier than the
  // margin a stop must come.
  unsigned look(double longest_step, double save_seconds);
  // Notes what rank `rank` was asked, once reported to all ranks: rank 0 logs a stop that it was
  // not asked for itself. Slurm's signal reaches the ranks one after another, and the first of them
  // stops all.
  void heard(int rank, unsigned asked);

 private:
  struct File {
    const char* name;
    unsigned request;
    const char* what;
    bool stays = false;  // seen, but could not be removed
  };

  bool seen(File& file);
  void stop(const std::string& by);

  std::filesystem::path run_dir_;
  double margin_seconds_;
  struct End {
    double at;         // on the clock of now_seconds()
    std::string what;  // "the end of the Slurm job", and so on
    std::string from;  // the variable or the key that says so
  };
  static std::optional<End> end_of_job(double max_hours);

  std::optional<End> end_;  // of the job
  std::array<File, 3> files_;
  double next_files_ = 0;  // when to look at the files again, on the same clock
  bool stopping_ = false;  // asked to stop
};

}  // namespace weft
