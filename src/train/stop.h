// What a run was asked from outside: to stop, to save, to write its trace. By signals (SIGTERM,
// SIGINT, SIGUSR1), by files in the run directory, and by the end of the Slurm job coming near. The
// step loop agrees on them between ranks.
#pragma once

#include <array>
#include <filesystem>
#include <optional>
#include <string>

namespace weft {

// Installs the handlers, on a thread of their own: call it before any thread that computes is
// started. A second SIGTERM or SIGINT ends the process at once with 64 + signal: the checkpoint
// before stays as it is.
void watch_stop_signals();
// The first signal received, 0 if none.
int stop_signal();

// Bits of what is asked for.
namespace request {
constexpr unsigned stop = 1, save = 2, dump_trace = 4;
// What a rank reports beside its requests: its save is still being written.
constexpr unsigned saving = 8;
}  // namespace request

class Requests {
 public:
  // `margin_seconds`: as run.stop_margin. Reads SLURM_JOB_END_TIME (seconds since the epoch);
  // Exit::usage if that is no time. On rank 0 it removes RUN/stopped, which tells of the run
  // before.
  Requests(std::filesystem::path run_dir, double margin_seconds);

  // What this rank was asked since the last call; `stop` stays. Every rank looks at its own
  // signals; the coordinator (rank 0) also at the clock and at the files RUN/stop, RUN/save,
  // RUN/dump_trace, of which it removes those it has seen: RUN/stop becomes RUN/stopped, by which a
  // job script knows not to submit again. Cheap enough for every step: files are looked at most
  // every half second. What was asked, and by whom, is one line of the log. `longest_step` and
  // `save_seconds`: how much earlier than the margin a stop must come.
  unsigned look(double longest_step, double save_seconds, bool coordinator);
  unsigned look(double longest_step, double save_seconds);
  // What rank `rank` was asked, as all ranks have heard: rank 0 logs a stop that it was not asked
  // for itself. Slurm's signal reaches the ranks one after another, and the first of them stops
  // all.
  void heard(int rank, unsigned asked);

 private:
  struct File {
    const char* name;
    unsigned request;
    const char* what;
    bool stays = false;  // seen, but it could not be taken away
  };

  bool seen(File& file);
  void stop(const std::string& by);

  std::filesystem::path run_dir_;
  double margin_seconds_;
  std::optional<double> end_;  // of the job, on the clock of now_seconds()
  std::array<File, 3> files_;
  double next_files_ = 0;  // when to look at the files again, on the same clock
  bool stopping_ = false;  // asked to stop
};

}  // namespace weft
