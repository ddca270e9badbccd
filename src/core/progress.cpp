#include "core/progress.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <mutex>
#include <nlohmann/json.hpp>
#include <optional>
#include <thread>

#include "core/clock.h"
#include "core/file.h"
#include "core/hash.h"
#include "core/host.h"
#include "core/json.h"
#include "core/log.h"

namespace weft {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

constexpr std::size_t longest_text = 1000, largest_file = 1 << 20;

std::string shortened(const std::string& text) {
  return text.size() <= longest_text ? text : text.substr(0, longest_text) + "...";
}

}  // namespace

std::string to_text(const JobStatus& s) {
  Json j = {{"command", s.command}, {"noun", s.noun},       {"state", s.state},
            {"code", s.code},       {"done", s.done},       {"total", s.total},
            {"before", s.before},   {"rate", s.rate},       {"left", s.left},
            {"ranks", s.ranks},     {"host", s.host},       {"pid", s.pid},
            {"started", s.started}, {"updated", s.updated}, {"advanced", s.advanced}};
  j["values"] = Json::object();
  for (const auto& [name, value] : s.values) j["values"][name] = value;
  j["warnings"] = Json::array();
  for (const std::string& w : s.warnings) j["warnings"].push_back(shortened(w));
  for (const auto& [text, count] : s.earlier_warnings)
    j["earlier_warnings"].push_back({shortened(text), count});
  if (!s.error.empty()) j["error"] = shortened(s.error);
  return seal_json(dump_json(j, -1, ' ', false, Json::error_handler_t::replace)) + "\n";
}

std::optional<JobStatus> read_status(const fs::path& file) {
  std::error_code none;
  if (!fs::is_regular_file(file, none) || fs::file_size(file, none) > largest_file)
    return std::nullopt;
  const std::string text = content_of(file);
  const Json j = try_parse_json<Json>(text);
  if (!j.is_object() || !seal_holds(text)) return std::nullopt;
  try {
    JobStatus s;
    // Whoever wrote the file: what it says is shown on terminals and pages.
    const auto text_of = [](const Json& value) {
      return printable(value.get<std::string>(), longest_text + 3);
    };
    s.command = text_of(j.at("command"));
    s.noun = text_of(j.at("noun"));
    s.state = text_of(j.at("state"));
    s.code = whole_number<int>(j.at("code"));
    s.done = whole_number<std::int64_t>(j.at("done"));
    s.total = whole_number<std::int64_t>(j.at("total"));
    s.before = whole_number<std::int64_t>(j.at("before"));
    s.rate = j.at("rate");
    s.left = j.at("left");
    s.ranks = whole_number<int>(j.at("ranks"));
    s.host = text_of(j.at("host"));
    s.started = j.at("started");
    s.updated = j.at("updated");
    s.advanced = j.at("advanced");
    for (const auto& [name, value] : j.at("values").items())
      // A loss that is not finite is null in JSON.
      s.values.emplace_back(name, value.is_number() ? value.get<double>() : NAN);
    for (const Json& w : j.at("warnings")) s.warnings.push_back(text_of(w));
    if (j.contains("error")) s.error = text_of(j.at("error"));
    if (j.contains("pid")) s.pid = whole_number<std::int64_t>(j.at("pid"));
    if (j.contains("earlier_warnings"))
      for (const Json& w : j.at("earlier_warnings"))
        s.earlier_warnings.emplace_back(text_of(w.at(0)), whole_number<std::int64_t>(w.at(1)));
    return s;
  } catch (const nlohmann::json::exception&) {
    return std::nullopt;
  }
}

std::string duration_text(double seconds) {
  if (!std::isfinite(seconds) || seconds < 0 || seconds > 1e10) return "-";
  const auto s = static_cast<std::int64_t>(std::llround(seconds));
  if (s < 60) return fmt::format("{} s", s);
  if (s < 3600) return fmt::format("{} min {:02} s", s / 60, s % 60);
  if (s < 86400) return fmt::format("{} h {:02} min", s / 3600, s % 3600 / 60);
  return fmt::format("{} d {} h", s / 86400, s % 86400 / 3600);
}

namespace {

constexpr double redraw_seconds = 0.2, line_seconds = 10;
constexpr auto heartbeat = std::chrono::seconds(5), patience = std::chrono::seconds(1);
constexpr double rate_window = 180, sample_seconds = 0.5;
constexpr std::size_t most_warnings = 100;

double unix_seconds() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

// What the start before knew, for one that goes on from it.
void take_over(const JobStatus& before, JobStatus& now) {
  now.values = before.values;
  now.earlier_warnings = before.earlier_warnings;
  for (const std::string& w : before.warnings) {
    const std::string kind = log::kind_of_warning(w);
    const auto same = std::ranges::find_if(now.earlier_warnings, [&](const auto& earlier) {
      return log::kind_of_warning(earlier.first) == kind;
    });
    if (same == now.earlier_warnings.end())
      now.earlier_warnings.emplace_back(w, 1);
    else
      *same = {w, same->second + 1};
  }
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
  s.status.pid = getpid();
  s.status.started = s.status.advanced = unix_seconds();
  s.told_at = now_seconds();
  s.items.add(now_seconds(), static_cast<double>(s.job.before));
  s.work.add(now_seconds(), 0);
  current() = state_;
  if (!s.tells() || s.job.file.empty()) return;
  if (const auto before = read_status(s.job.file); before && s.job.before > 0)
    take_over(*before, s.status);
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
