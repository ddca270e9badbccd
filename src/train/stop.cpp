#include "train/stop.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>

#include "core/clock.h"
#include "core/error.h"
#include "core/faults.h"
#include "core/log.h"

namespace weft {
namespace {

std::atomic<bool> asked_to_end = false;

void on_signal(int signal) {
  // Only async-signal-safe work here: atomics and _exit.
  // Several of the other signals may mean one request: SIGXCPU comes every second.
  if ((signal == SIGTERM || signal == SIGINT) && asked_to_end.exchange(true)) _exit(64 + signal);
  int none = 0;
  stop_received.compare_exchange_strong(none, signal);
}

}  // namespace

void watch_stop_signals() {
  struct sigaction action {};
  action.sa_handler = on_signal;
  sigemptyset(&action.sa_mask);
  action.sa_flags = SA_RESTART;
  for (const int signal : stop_signals) {
    struct sigaction now {};
    sigaction(signal, nullptr, &now);
    if (signal == SIGHUP && now.sa_handler == SIG_IGN) continue;  // nohup
    sigaction(signal, &action, nullptr);
  }
  // A separate thread takes the signals; this thread and all that it starts block them.
  // oneDNN 2.6's sgemm keeps data below the stack's red zone, which a handler on a computing thread
  // would overwrite.
  block_stop_signals();
  std::thread([] {
    unblock_stop_signals();
    for (;;) pause();
  }).detach();
}

int stop_signal() { return stop_received; }

namespace {

constexpr double files_every = 0.5;  // seconds: each look is three calls to a shared file system

double seconds_since_epoch() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

const double program_start = now_seconds();

// The number in that variable; 0 without one, and for what stands for no limit. Exit::usage for
// another text, or with `ignored` a WARN on rank 0.
double seconds_in(const char* variable, const char* hint, bool ignored = false) {
  const char* text = std::getenv(variable);
  if (!text || !*text) return 0;
  double seconds = 0;
  const char* last = text + std::strlen(text);
  const auto [stopped, fault] = std::from_chars(text, last, seconds);
  const bool good = fault == std::errc() && stopped == last && std::isfinite(seconds);
  WEFT_CHECK(good || ignored, Exit::usage, hint, "{} = \"{}\" is not a time", variable, text);
  if (!good && log::rank() == 0) log::warn("{} = \"{}\" is ignored: {}", variable, text, hint);
  if (!good) return 0;
  constexpr double no_limit = 4294967294;  // Slurm's NO_VAL; INFINITE is one more
  return seconds >= no_limit ? 0 : std::max(seconds, 0.0);
}

// When the Slurm job ends, on the clock of now_seconds(). The wall clock is read only here, so that
// setting it later does not change the time left.
std::optional<double> end_of_slurm_job() {
  const double end =
      seconds_in("SLURM_JOB_END_TIME",
                 "it is seconds since 1970, as of `date +%s`; unset it if no Slurm job ends then");
  if (end == 0) return {};
  const double left = end - seconds_since_epoch();
  if (left <= 0) {
    if (log::rank() == 0)
      log::warn(
          "SLURM_JOB_END_TIME = {:.0f} passed {:.0f} s ago and is ignored: left over from another "
          "job?",
          end, -left);
    return {};
  }
  return now_seconds() + left;
}

std::string signal_name(int signal) {
  constexpr const char* names[] = {"SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2", "SIGXCPU", "SIGHUP"};
  static_assert(std::size(names) == stop_signals.size());
  return names[std::ranges::find(stop_signals, signal) - stop_signals.begin()];
}

}  // namespace

// The earliest end of those that are known.
std::optional<Requests::End> Requests::end_of_job(double max_hours) {
  std::optional<End> first;
  const auto take = [&](double at, const char* what, const char* from) {
    if (!first || at < first->at) first = End{at, what, from};
  };
  if (const auto end = end_of_slurm_job())
    take(*end, "the end of the Slurm job", "SLURM_JOB_END_TIME");
  // Its form differs between versions of PBS.
  const double walltime = seconds_in(
      "PBS_WALLTIME", "seconds are read; say when the job ends with run.max_hours", true);
  if (walltime > 0) take(program_start + walltime, "the end of the PBS job", "PBS_WALLTIME");
  if (max_hours > 0) take(program_start + 3600 * max_hours, "the end of its time", "run.max_hours");
  return first;
}

Requests::Requests(std::filesystem::path run_dir, double margin_seconds, double max_hours)
    : run_dir_(std::move(run_dir)),
      margin_seconds_(margin_seconds),
      end_(end_of_job(max_hours)),
      files_{{{"stop", request::stop, "stop"},
              {"save", request::save, "save"},
              {"dump_trace", request::dump_trace, "write its trace"}}} {
  std::error_code none_there;
  // RUN/stopped is from the run before: job scripts would not submit again.
  if (log::rank() == 0) std::filesystem::remove(run_dir_ / "stopped", none_there);
}

unsigned Requests::look(double longest_step, double save_seconds) {
  unsigned asked = 0;
  if (!stopping_ && stop_signal() != 0) stop(signal_name(stop_signal()));
  if (log::rank() == 0) {
    const double now = now_seconds();
    if (now >= next_files_) {
      next_files_ = now + files_every;
      for (File& file : files_) {
        if (!seen(file)) continue;
        if (file.request == request::stop)
          stop((run_dir_ / file.name).string());
        else
          log::info("asked to {} by {}", file.what, (run_dir_ / file.name).string());
        asked |= file.request;
      }
    }
    // One more step, then a save, must end before the margin begins.
    const double needed =
        margin_seconds_ + std::max(longest_step, 0.0) + std::max(save_seconds, 0.0);
    if (!stopping_ && end_ && end_->at - now < needed)
      stop(fmt::format("{} in {:.0f} s ({}; a step, a save and run.stop_margin take {:.0f} s)",
                       end_->what, std::max(end_->at - now, 0.0), end_->from, needed));
  }
  return stopping_ ? asked | request::stop : asked;
}

void Requests::heard(int rank, unsigned asked) {
  if ((asked & request::stop) == 0) return;
  // This rank's own signal may have arrived meanwhile.
  stop(stop_signal() != 0 ? signal_name(stop_signal()) : fmt::format("a signal to rank {}", rank));
}

// Whether the file is there; if so, removes it. A file that cannot be removed counts as one request
// until it is gone.
bool Requests::seen(File& file) {
  const std::filesystem::path path = run_dir_ / file.name;
  struct stat status;
  // lstat: a link counts as the request, wherever it leads.
  if (lstat(path.c_str(), &status) != 0 || S_ISDIR(status.st_mode)) {
    file.stays = false;
    return false;
  }
  if (file.stays) return false;
  const bool gone = file.request == request::stop
                        ? std::rename(path.c_str(), (run_dir_ / "stopped").c_str()) == 0
                        : unlink(path.c_str()) == 0;
  // ENOENT: somebody else removed the file after the lstat.
  if (!gone && errno != ENOENT) {
    file.stays = true;
    log::warn("{} was read, but cannot be removed ({}): remove it to use it again", path.string(),
              std::strerror(errno));
  }
  return true;
}

// Logs only the first request to stop.
void Requests::stop(const std::string& by) {
  if (!stopping_) log::info("asked to stop by {}", by);
  stopping_ = true;
}

}  // namespace weft
