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
#include <numeric>
#include <optional>
#include <thread>
#include <utility>

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

// ---- What a job took ----

namespace {

class WallTime {
 public:
  std::string begin(const std::string& part) {
    const double now = now_seconds();
    parts_[current_].second += now - since_;
    since_ = now;
    const std::size_t before = current_;
    const auto same = std::ranges::find(parts_, part, &std::pair<std::string, double>::first);
    current_ = static_cast<std::size_t>(same - parts_.begin());
    if (same == parts_.end()) parts_.emplace_back(part, 0);
    return parts_[before].first;
  }
  const std::vector<std::pair<std::string, double>>& until_now() {
    begin(std::string(parts_[current_].first));
    return parts_;
  }

 private:
  std::vector<std::pair<std::string, double>> parts_ = {{"start", 0}};
  std::size_t current_ = 0;
  double since_ = now_seconds();
};
WallTime wall_time;  // since the program began

// As sacct's Elapsed: "1-02:03:04", "02:03:04".
std::string elapsed_text(double seconds) {
  const auto s = static_cast<std::int64_t>(std::llround(seconds));
  return (s < 86400 ? std::string() : fmt::format("{}-", s / 86400)) +
         fmt::format("{:02}:{:02}:{:02}", s % 86400 / 3600, s % 3600 / 60, s % 60);
}

// Names of stages are members of reports: "network_waited".
std::string words_of(std::string name) {
  std::ranges::replace(name, '_', ' ');
  return printable(name, 18);
}

std::string rate_text(double flops) {
  return flops >= 1e12 ? fmt::format("{:.4g} TFLOP/s", 1e-12 * flops)
                       : fmt::format("{:.4g} GFLOP/s", 1e-9 * flops);
}

// DIR/[STORE.]FILE of a job's DIR/[STORE.]status.json.
fs::path beside(const fs::path& status, const std::string& file) {
  constexpr std::string_view ending = "status.json";
  std::string name = status.filename().string();
  name.replace(name.size() - ending.size(), ending.size(), file);
  return status.parent_path() / name;
}

}  // namespace

void begin_part(const std::string& part) { wall_time.begin(part); }
WallPart::WallPart(const std::string& part) : before_(wall_time.begin(part)) {}
std::vector<std::pair<std::string, double>> wall_parts() { return wall_time.until_now(); }

Json summary_json(const std::string& command, const JobWork& work,
                  const std::vector<std::pair<std::string, double>>& wall) {
  const auto ranks = static_cast<double>(work.hosts.size());
  double all = 0;
  for (const auto& [part, seconds] : wall) all += seconds;
  Json j = {{"command", command},
            {"ranks", work.hosts.size()},
            {"threads", work.threads},
            {"on_gpu", work.on_gpu},
            {"wall_seconds", all}};
  for (const auto& [part, seconds] : wall) j["wall"][part] = seconds;
  j[work.on_gpu ? "gpu_hours" : "core_hours"] =
      all * ranks * (work.on_gpu ? 1 : work.threads) / 3600;
  if (work.items <= 0 || work.seconds <= 0) return j;
  j["speed"] = {{"unit", work.unit},
                {"items", work.items},
                {"seconds", work.seconds},
                {"a_second", work.items / work.seconds},
                {"a_second_a_rank", work.items / work.seconds / ranks},
                {"note", work.note}};
  if (work.flops > 0) {
    j["operations"] = {{"all", work.flops}, {"a_second_a_rank", work.flops / work.seconds / ranks}};
    if (work.limit > 0) {
      j["operations"]["limit_a_rank"] = work.limit / ranks;
      j["operations"]["share_of_limit"] = work.flops / work.seconds / work.limit;
    }
  }

  if (work.parts.empty()) return j;
  // Of each part the least, the mean, the greatest and whose it is; shares are of all parts' means.
  auto parts = work.parts;
  std::vector<double> other(work.hosts.size(), work.seconds);
  for (const auto& [part, seconds] : parts)
    for (std::size_t r = 0; r < other.size(); ++r) other[r] -= seconds[r];
  for (double& s : other) s = std::max(0.0, s);
  parts.emplace_back("other", std::move(other));
  const auto mean = [&](const std::vector<double>& v) {
    return std::accumulate(v.begin(), v.end(), 0.0) / ranks;
  };
  double sum = 0;
  for (const auto& [part, seconds] : parts) sum += mean(seconds);
  for (const auto& [part, seconds] : parts) {
    const auto [least, most] = std::ranges::minmax_element(seconds);
    j["parts"][part] = {{"min", *least},
                        {"mean", mean(seconds)},
                        {"max", *most},
                        {"share", mean(seconds) / sum},
                        {"greatest_rank", most - seconds.begin()},
                        {"greatest_host", work.hosts[most - seconds.begin()]}};
  }
  return j;
}

std::vector<std::pair<std::string, std::string>> summary_lines(const Json& j) {
  std::vector<std::pair<std::string, std::string>> lines;
  const auto text_of = [](const Json& text) { return printable(text.get<std::string>(), 100); };
  try {
    const std::string rank = j.at("on_gpu").get<bool>() ? "GPU" : "rank";
    if (j.contains("speed")) {
      const Json& s = j.at("speed");
      const std::string note = text_of(s.at("note"));
      lines.emplace_back(
          "speed", fmt::format("{:.4g} {}s/s, {:.4g} a {}{}", s.at("a_second").get<double>(),
                               text_of(s.at("unit")), s.at("a_second_a_rank").get<double>(), rank,
                               note.empty() ? "" : fmt::format(" ({})", note)));
    }
    if (j.contains("operations")) {
      const Json& o = j.at("operations");
      std::string text = rate_text(o.at("a_second_a_rank")) + " a " + rank;
      if (o.contains("limit_a_rank"))
        text += fmt::format(", {:.1f} % of the {} that a large matrix product reaches here",
                            100 * o.at("share_of_limit").get<double>(),
                            rate_text(o.at("limit_a_rank")));
      lines.emplace_back("work", text);
    }
    if (j.contains("parts")) {
      lines.emplace_back("seconds", fmt::format("{:<18} {:>9} {:>9} {:>9} {:>7}  {}", "of a rank",
                                                "min", "mean", "max", "share", "greatest"));
      for (const auto& [part, p] : j.at("parts").items())
        lines.emplace_back(
            "",
            fmt::format("{:<18} {:9.3f} {:9.3f} {:9.3f} {:5.1f} %  rank {} on {}", words_of(part),
                        p.at("min").get<double>(), p.at("mean").get<double>(),
                        p.at("max").get<double>(), 100 * p.at("share").get<double>(),
                        p.at("greatest_rank").get<std::int64_t>(), text_of(p.at("greatest_host"))));
    }
    std::string parts;
    for (const auto& [part, seconds] : j.at("wall").items())
      parts += fmt::format("{}{} {:.1f}", parts.empty() ? "" : ", ", printable(part, 30),
                           seconds.get<double>());
    const double wall = j.at("wall_seconds");
    lines.emplace_back("wall time",
                       fmt::format("{:.1f} s ({}): {}", wall, elapsed_text(wall), parts));
    const bool gpu = j.contains("gpu_hours");
    std::string of = counted(j.at("ranks").get<std::int64_t>(), rank);
    if (!gpu) of += " of " + counted(j.at("threads").get<std::int64_t>(), "thread");
    lines.emplace_back("cost", fmt::format("{:.4g} {}-hours, {}",
                                           j.at(gpu ? "gpu_hours" : "core_hours").get<double>(),
                                           gpu ? "GPU" : "core", of));
  } catch (const nlohmann::json::exception&) {
    return {};
  }
  return lines;
}

Json read_summary(const fs::path& status) {
  if (const auto job = read_status(status); job && job->state == "running") return {};
  const fs::path file = beside(status, "summary.json");
  std::error_code none;
  if (!fs::is_regular_file(file, none) || fs::file_size(file, none) > largest_file) return {};
  const std::string text = content_of(file);
  return seal_holds(text) ? try_parse_json<Json>(text) : Json();
}

// ---- The job's progress ----

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
  std::optional<JobWork> made;
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
    const bool lost = status.state == "failed" && status.done > status.before;
    if (log::is_live()) log::live("");
    lock.unlock();
    write();
    std::error_code none;  // the summary of an earlier start does not tell of this one
    if (lost && !job.file.empty()) fs::remove(beside(job.file, "summary.json"), none);
  }

  void sum_up() const {
    if (!made) return;
    const Json summary = summary_json(job.command, *made, wall_parts());
    for (const auto& [label, text] : summary_lines(summary))
      log::write_info(fmt::format("{:<9} {}", label, text));
    write_beside("summary.json", seal_json(dump_json(summary, 2)) + "\n");
  }

  void write_beside(const std::string& file, const std::string& text) const {
    if (job.file.empty() || text.empty()) return;
    try {
      replace_file(beside(job.file, file), text, Exit::data, Durable::no);
    } catch (const Error& e) {
      log::warn("{} of the job: {}", file, e.what());
    }
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
  s.write_beside("cite.bib", s.job.cite);
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

void Progress::set_work(JobWork work) {
  const std::lock_guard lock(state_->mutex);
  if (state_->tells()) state_->made = std::move(work);
}

std::string Progress::left_text() const {
  const std::lock_guard lock(state_->mutex);
  return state_->left_text();
}

void Progress::end(int code, std::int64_t done, const std::string& error) {
  const std::lock_guard file(state_->file_mutex);
  state_->finish(code, error, done);
  state_->sum_up();
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
