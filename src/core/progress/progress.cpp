#include "core/progress/progress.h"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <optional>
#include <thread>

#include "core/clock.h"
#include "core/file.h"
#include "core/host.h"
#include "core/log.h"
#include "core/progress/job_status.h"

namespace weft {
namespace {

constexpr double redraw_seconds = 0.2, line_seconds = 10;
constexpr auto heartbeat = std::chrono::seconds(5), patience = std::chrono::seconds(1);
constexpr double rate_window = 180, sample_seconds = 0.5;
constexpr std::size_t most_warnings = 20;

double unix_seconds() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

}  // namespace

void WorkRate::add(double now, double work) {
  // The newest moves on until it is a sample's length away from the one before it.
  if (seen_.size() >= 2 && now - seen_[seen_.size() - 2].first < sample_seconds) seen_.pop_back();
  seen_.emplace_back(now, work);
  while (seen_.size() > 2 && now - seen_.front().first > rate_window) seen_.pop_front();
}

double WorkRate::per_second() const {
  if (seen_.size() < 2) return 0;
  const double seconds = seen_.back().first - seen_.front().first;
  const double work = seen_.back().second - seen_.front().second;
  return seconds > 0 && work > 0 ? work / seconds : 0;
}

struct Progress::State {
  Job job;
  // Held while the file is written, which takes as long as the file system likes. Taken before
  // `mutex`, so that the last status written is the newest.
  std::timed_mutex file_mutex;
  mutable std::mutex mutex;  // of what follows
  JobStatus status;
  WorkRate items, work;
  double drawn_at = 0, told_at = 0;
  bool ended = false, failing = false;
  std::jthread beat;

  bool tells() const { return job.rank == 0; }

  // With file_mutex held. A status that cannot be written is no reason to end a job.
  void write() {
    if (job.file.empty()) return;
    std::unique_lock lock(mutex);
    status.updated = unix_seconds();
    std::vector<std::string> warnings = log::warnings();
    if (warnings.size() > most_warnings)
      warnings.erase(warnings.begin(), warnings.end() - most_warnings);
    if (tells()) status.warnings = std::move(warnings);
    const std::string text = to_text(status);
    const bool quiet = failing;
    lock.unlock();
    std::string why;
    try {
      replace_file(job.file, text, Exit::data, Durable::no);
    } catch (const std::exception& e) {
      why = e.what();
    }
    if (!why.empty() && !quiet) log::warn("the status of the job: {}", why);
    lock.lock();
    failing = !why.empty();
  }

  std::string left_text() const {
    return status.left > 0 ? fmt::format(", {} left", duration_text(status.left)) : std::string();
  }

  std::string line() const {
    std::string text = fmt::format("{} of {} {}s", status.done, status.total, status.noun);
    if (status.rate > 0)
      text += fmt::format(", {:.{}f} {}s/s", status.rate, status.rate < 100 ? 2 : 0, status.noun);
    text += left_text();
    for (const auto& [name, value] : status.values) text += fmt::format(", {} {:.4g}", name, value);
    return text;
  }

  void draw() const {
    constexpr std::int64_t width = 20;
    const std::int64_t total = std::max<std::int64_t>(1, status.total);
    const auto filled =
        static_cast<std::size_t>(std::clamp(width * status.done / total, std::int64_t{0}, width));
    log::live(fmt::format("[{}{}] {}", std::string(filled, '#'), std::string(width - filled, '.'),
                          line()));
  }

  // With file_mutex held.
  void finish(int code, const std::string& error, std::optional<std::int64_t> done = {}) {
    // What rank 0 knows of the job is in the file.
    const std::optional<JobStatus> there = tells() ? std::nullopt : read_status(job.file);
    std::unique_lock lock(mutex);
    if (ended) return;
    ended = true;
    if (there) status = *there;
    if (done) status.done = *done;
    status.code = code;
    status.left = 0;
    status.error = error;
    status.state = code == 0                                 ? "finished"
                   : code == static_cast<int>(Exit::stopped) ? "stopped"
                                                             : "failed";
    if (log::is_live()) log::live("");
    lock.unlock();
    write();
  }
};

namespace {
// Kept until the next job begins: an error unwinds the Progress before main hears of it.
std::atomic<std::shared_ptr<Progress::State>>& current() {
  static std::atomic<std::shared_ptr<Progress::State>> job;
  return job;
}
}  // namespace

Progress::Progress(Job job) : state_(std::make_shared<State>()) {
  State& s = *state_;
  s.job = std::move(job);
  s.status.command = s.job.command;
  s.status.noun = s.job.noun;
  s.status.total = s.job.total;
  s.status.before = s.status.done = s.job.before;
  s.status.ranks = s.job.ranks;
  s.status.host = host_name();
  s.status.started = s.status.advanced = unix_seconds();
  s.told_at = now_seconds();
  s.items.add(now_seconds(), static_cast<double>(s.job.before));
  s.work.add(now_seconds(), 0);
  current() = state_;
  if (!s.tells() || s.job.file.empty()) return;
  s.write();
  // An item may take minutes: between items the file shows that the job lives.
  s.beat = std::jthread([state = &s](const std::stop_token& stop) {
    std::mutex mutex;
    std::unique_lock lock(mutex);
    std::condition_variable_any ended;
    while (!ended.wait_for(lock, stop, heartbeat, [] { return false; }) && !stop.stop_requested()) {
      const std::lock_guard file(state->file_mutex);
      std::unique_lock guard(state->mutex);
      const bool ended_meanwhile = state->ended;
      guard.unlock();
      if (!ended_meanwhile) state->write();
    }
  });
}

Progress::~Progress() {
  state_->beat = std::jthread();
  if (log::is_live()) log::live("");
}

void Progress::advance(std::int64_t done, double work, double all, const Values& values) {
  State& s = *state_;
  const std::lock_guard lock(s.mutex);
  // What a failed rank left over is made late: its place in the list is an earlier one.
  if (!s.tells() || s.ended || done < s.status.done) return;
  const double now = now_seconds();
  s.items.add(now, static_cast<double>(done));
  s.work.add(now, work);
  s.status.done = done;
  s.status.values = values;
  s.status.advanced = unix_seconds();
  s.status.rate = s.items.per_second();
  const double rate = s.work.per_second();
  s.status.left = rate > 0 ? std::max(0.0, all - work) / rate : 0;
  if (log::is_live()) {
    if (now - s.drawn_at >= redraw_seconds) {
      s.drawn_at = now;
      s.draw();
    }
  } else if (!s.job.label.empty() && now - s.told_at >= line_seconds) {
    s.told_at = now;
    log::write_info(s.job.label + ": " + s.line());
  }
}

void Progress::hide() {
  const std::lock_guard lock(state_->mutex);
  if (log::is_live()) log::live("");
}

std::string Progress::left_text() const {
  const std::lock_guard lock(state_->mutex);
  return state_->left_text();
}

void Progress::end(int code, std::int64_t done, const std::string& error) {
  const std::lock_guard file(state_->file_mutex);
  state_->finish(code, error, done);
}

void note_failure(const Error& e) {
  const std::shared_ptr<Progress::State> state = current();
  if (!state) return;
  // A file system that hangs must not keep the job from its end.
  const std::unique_lock file(state->file_mutex, patience);
  if (!file) return;
  {
    const std::lock_guard lock(state->mutex);
    state->failing = true;  // several ranks may write at once: no further messages
  }
  state->finish(static_cast<int>(e.code()), e.what());
}

}  // namespace weft
