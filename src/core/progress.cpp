#include "core/progress.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <fstream>
#include <mutex>
#include <nlohmann/json.hpp>
#include <thread>

#include "core/clock.h"
#include "core/file.h"
#include "core/host.h"
#include "core/json.h"
#include "core/log.h"
#include "core/seal.h"

namespace weft {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

constexpr double redraw_seconds = 0.2, line_seconds = 10, write_seconds = 5;
constexpr auto heartbeat = std::chrono::seconds(10);
constexpr double rate_window = 180, sample_seconds = 0.5;
constexpr std::size_t most_warnings = 20, longest_text = 1000, largest_file = 1 << 20;

double unix_seconds() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

std::string shortened(const std::string& text) {
  return text.size() <= longest_text ? text : text.substr(0, longest_text) + "...";
}

}  // namespace

std::string to_text(const JobStatus& s) {
  Json j = {{"command", s.command}, {"noun", s.noun},        {"state", s.state},
            {"code", s.code},       {"done", s.done},        {"total", s.total},
            {"before", s.before},   {"rate", s.rate},        {"left", s.left},
            {"ranks", s.ranks},     {"host", s.host},        {"started", s.started},
            {"updated", s.updated}, {"advanced", s.advanced}};
  j["values"] = Json::object();
  for (const auto& [name, value] : s.values) j["values"][name] = value;
  j["warnings"] = Json::array();
  for (const std::string& w : s.warnings) j["warnings"].push_back(shortened(w));
  if (!s.error.empty()) j["error"] = shortened(s.error);
  return seal_json(j.dump(-1, ' ', false, Json::error_handler_t::replace)) + "\n";
}

std::optional<JobStatus> read_status(const fs::path& file) {
  std::error_code none;
  if (!fs::is_regular_file(file, none) || fs::file_size(file, none) > largest_file)
    return std::nullopt;
  std::ifstream in(file, std::ios::binary);
  const std::string text{std::istreambuf_iterator<char>(in), {}};
  const Json j = try_parse_json<Json>(text);
  if (!j.is_object() || !seal_holds(text)) return std::nullopt;
  try {
    JobStatus s;
    s.command = j.at("command");
    s.noun = j.at("noun");
    s.state = j.at("state");
    s.code = j.at("code");
    s.done = j.at("done");
    s.total = j.at("total");
    s.before = j.at("before");
    s.rate = j.at("rate");
    s.left = j.at("left");
    s.ranks = j.at("ranks");
    s.host = j.at("host");
    s.started = j.at("started");
    s.updated = j.at("updated");
    s.advanced = j.at("advanced");
    for (const auto& [name, value] : j.at("values").items())
      // A loss that is not finite is null in JSON.
      s.values.emplace_back(name, value.is_number() ? value.get<double>() : NAN);
    for (const Json& w : j.at("warnings")) s.warnings.push_back(w);
    s.error = j.value("error", "");
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
  mutable std::mutex mutex;  // of what follows
  JobStatus status;
  WorkRate items, work;
  double drawn_at = 0, told_at = 0, written_at = 0;
  bool ended = false, failing = false;
  std::jthread beat;

  bool tells() const { return job.rank == 0; }

  // A status that cannot be written is no reason to end a job.
  void write() {
    if (job.file.empty()) return;
    written_at = now_seconds();
    status.updated = unix_seconds();
    std::vector<std::string> warnings = log::warnings();
    if (warnings.size() > most_warnings)
      warnings.erase(warnings.begin(), warnings.end() - most_warnings);
    if (tells()) status.warnings = std::move(warnings);
    try {
      replace_file(job.file, to_text(status), Exit::data, Durable::no);
      failing = false;
    } catch (const std::exception& e) {
      if (!failing) log::warn("the status of the job: {}", e.what());
      failing = true;
    }
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

  void finish(int code, const std::string& error) {
    ended = true;
    status.code = code;
    status.left = 0;
    status.error = error;
    status.state = code == 0                                 ? "finished"
                   : code == static_cast<int>(Exit::stopped) ? "stopped"
                                                             : "failed";
    if (log::is_live()) log::live("");
    write();
  }
};

namespace {
// Kept until the next job begins: an error unwinds the Progress before main hears of it.
std::shared_ptr<Progress::State>& current() {
  static std::shared_ptr<Progress::State> job;
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
      const std::lock_guard guard(state->mutex);
      if (!state->ended) state->write();
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
  if (!s.tells() || s.ended) return;
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
  if (now - s.written_at >= write_seconds) s.write();
}

std::string Progress::left_text() const {
  const std::lock_guard lock(state_->mutex);
  return state_->left_text();
}

void Progress::end(int code, std::int64_t done, const std::string& error) {
  State& s = *state_;
  const std::lock_guard lock(s.mutex);
  if (s.ended) return;
  s.status.done = done;
  s.finish(code, error);
}

void note_failure(const Error& e) {
  const std::shared_ptr<Progress::State> state = current();
  if (!state) return;
  const std::lock_guard lock(state->mutex);
  if (state->ended) return;
  state->failing = true;  // several ranks may write at once: no further messages
  // What rank 0 knows of the job is in the file.
  if (!state->tells())
    if (const auto there = read_status(state->job.file)) state->status = *there;
  state->finish(static_cast<int>(e.code()), e.what());
}

}  // namespace weft
