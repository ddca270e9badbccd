#include "report/status.h"

#include <fmt/chrono.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <ctime>
#include <iterator>
#include <memory>
#include <nlohmann/json.hpp>
#include <thread>
#include <utility>

#include "checkpoint/manifest.h"
#include "core/error.h"
#include "core/host.h"
#include "core/json.h"
#include "core/log.h"
#include "report/follow.h"
#include "train/metrics/metrics.h"

namespace weft {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

// A job that lives writes its status every five seconds.
constexpr double silent_after = 60, gone_after = 15;
constexpr int deepest = 5;                   // folders below the one that is named
constexpr std::size_t most_folders = 20000;  // that are looked at

// Whether the job's first rank was a process of this host, and is none any more.
bool is_gone(const JobStatus& s) {
  return s.pid > 0 && s.host == host_name() && kill(static_cast<pid_t>(s.pid), 0) != 0 &&
         errno == ESRCH;
}

std::string newest_checkpoint(const fs::path& dir) {
  const auto latest = checkpoint::read_latest(dir);
  std::error_code none;
  return latest && fs::exists(dir / *latest, none) ? *latest : "";
}

// Steps done by the last whole line of the metrics, 0 without one. A line of a thousand ranks takes
// some kilobytes, and a run has many: only the end is read.
std::int64_t steps_of_metrics(const fs::path& dir) {
  const std::vector<std::string> lines = FileTail(dir / "metrics.jsonl").take();
  for (auto line = lines.rbegin(); line != lines.rend(); ++line)
    if (const nlohmann::json j = parse_step_line(*line); !j.is_discarded())
      return j["step"].get<std::int64_t>() + 1;
  return 0;
}

// The status is written every five seconds, metrics and checkpoints at once: after a crash, and
// where steps are short, they are ahead.
void count_steps(const fs::path& dir, KnownJob& job) {
  JobStatus& s = job.status;
  std::int64_t done = steps_of_metrics(dir);
  if (const auto step = checkpoint::step_of(job.checkpoint)) done = std::max(done, *step);
  if (done <= s.done) return;
  s.done = done;
  s.advanced = std::max(s.advanced, s.updated);
}

bool goes_on(const JobStatus& s) { return s.state == "running"; }

std::string pace_text(const JobStatus& s) {
  std::string text = s.rate >= 100   ? fmt::format("{:.0f} {}s/s", s.rate, s.noun)
                     : s.rate >= 0.1 ? fmt::format("{:.3g} {}s/s", s.rate, s.noun)
                     : s.rate > 0    ? fmt::format("{} a {}", duration_text(1 / s.rate), s.noun)
                                     : "";
  if (goes_on(s) && s.left > 0)
    text += fmt::format("{}{} left", text.empty() ? "" : ", ", duration_text(s.left));
  return text;
}

// The label of one of JobStatus::values.
std::string label_of(const std::string& name) {
  return name == "validation_loss" ? "held out" : printable(name);
}

// Whether this start has finished an item: until then `advanced` is when it began.
bool has_advanced(const JobStatus& s) { return s.done > s.before && s.advanced > 0; }

void search_folder(const fs::path& folder, int depth, std::size_t& folders_seen, double now,
                   std::vector<KnownJob>& jobs) {
  std::error_code failed;
  std::vector<fs::path> folders;
  for (fs::directory_iterator it(folder, failed), end; !failed && it != end; it.increment(failed)) {
    const std::string name = it->path().filename().string();
    if (name.starts_with('.')) continue;
    std::error_code none;
    const fs::file_status what = it->symlink_status(none);
    if (fs::is_directory(what)) folders.push_back(it->path());
    constexpr std::string_view beside = ".status.json";
    if (fs::is_regular_file(what) && name.ends_with(beside))
      if (auto job = find_job(
              (folder / name.substr(0, name.size() - beside.size())).lexically_normal(), now))
        jobs.push_back(std::move(*job));
  }
  for (const fs::path& f : folders) {
    if (++folders_seen > most_folders) return;
    if (auto job = find_job(f.lexically_normal(), now)) jobs.push_back(std::move(*job));
    // Also below a job: a training run holds what was generated from it.
    if (depth < deepest) search_folder(f, depth + 1, folders_seen, now, jobs);
  }
}

std::vector<std::string> warnings_of_before(const JobStatus& s) {
  std::vector<std::string> lines;
  for (const auto& [text, count] : s.earlier_warnings)
    lines.push_back(count == 1 ? text : fmt::format("{} ({} of this kind)", text, count));
  return lines;
}

std::string state_text(const JobStatus& s) {
  if (s.state == "silent") return "no sign of life since " + time_text(s.updated);
  if (s.state == "stopped") return "stopped early";
  if (s.state == "failed") return fmt::format("failed (exit code {})", s.code);
  return s.state;
}

std::string share_text(const JobStatus& s) {
  if (s.total <= 0) return fmt::format("{}", s.done);
  return fmt::format("{} of {}", s.done, s.total);
}

}  // namespace

std::string time_text(double seconds) {
  if (!(seconds > 0) || seconds > 4e9) return "-";
  return fmt::format("{:%Y-%m-%d %H:%M:%S}", fmt::localtime(static_cast<std::time_t>(seconds)));
}

double seconds_since_1970() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

std::optional<KnownJob> find_job(const fs::path& path, double now) {
  std::error_code none;
  KnownJob job;
  job.path = path;
  std::optional<JobStatus> status;
  // Beside a file: of jobs that make one file, and of those that keep a folder beside it.
  std::string plain = path.string();
  while (plain.size() > 1 && plain.ends_with('/')) plain.pop_back();
  for (const fs::path& file : {path / "status.json", fs::path(plain + ".status.json"),
                               fs::path(plain + ".parts/status.json")})
    if (!status && (status = read_status(file))) job.summary = read_summary(file);
  if (!status) return std::nullopt;
  job.status = std::move(*status);
  JobStatus& s = job.status;
  const double quiet = now - s.updated;
  if (s.state == "running" && (quiet > silent_after || (quiet > gone_after && is_gone(s))))
    s.state = "silent";
  if (s.command == "train") {
    job.checkpoint = newest_checkpoint(path);
    count_steps(path, job);
  }
  return job;
}

std::vector<KnownJob> find_jobs(const fs::path& given, double now) {
  // One path for each job: "runs/x/" is "runs/x".
  fs::path path = given.lexically_normal();
  if (!path.has_filename() && path.has_relative_path()) path = path.parent_path();
  std::vector<KnownJob> jobs;
  if (auto job = find_job(path, now)) {
    jobs.push_back(std::move(*job));
    return jobs;
  }
  std::size_t folders_seen = 0;
  search_folder(path, 1, folders_seen, now, jobs);
  if (folders_seen > most_folders)
    log::warn(
        "{} has more than {} folders: jobs in the others are left out; name a folder below it",
        path.string(), most_folders);
  std::sort(jobs.begin(), jobs.end(),
            [](const KnownJob& a, const KnownJob& b) { return a.path < b.path; });
  return jobs;
}

std::string describe_job(const KnownJob& job, double now) {
  const JobStatus& s = job.status;
  std::string text;
  const auto row = [&](const char* name, const std::string& value) {
    if (!value.empty()) text += fmt::format("{:<9} {}\n", name, printable(value, 2000));
  };
  row("job", fmt::format("{}, {}", job.path.string(), s.command));
  std::string state = state_text(s);
  if (goes_on(s))
    state += fmt::format(", last heard of {} ago", duration_text(std::max(0.0, now - s.updated)));
  if (goes_on(s) && has_advanced(s))
    state +=
        fmt::format(", last {} {} ago", s.noun, duration_text(std::max(0.0, now - s.advanced)));
  else if (goes_on(s) && s.advanced > 0)
    state += fmt::format(", no {} yet{}", s.noun, s.before > 0 ? " by this start" : "");
  row("state", state);
  row(s.state == "finished" ? "reason" : "error", s.error);
  std::string done = share_text(s) + " " + s.noun + "s";
  if (s.total > 0)
    done += fmt::format(" ({:.1f} %)",
                        100 * static_cast<double>(s.done) / static_cast<double>(s.total));
  if (s.before > 0) done += fmt::format(", {} of them by earlier starts", s.before);
  row("done", done);
  row("pace", pace_text(s));
  for (const auto& [name, value] : s.values)
    row(label_of(name).c_str(), fmt::format("{:.6g}", value));
  row("ranks", fmt::format("{}{}", s.ranks, s.host.empty() ? "" : ", the first on " + s.host));
  row("saved", job.checkpoint);
  if (s.started > 0) {
    const double until = goes_on(s) ? now : s.updated;
    row("started", fmt::format("{}, {} {}", time_text(s.started), goes_on(s) ? "for" : "took",
                               duration_text(std::max(0.0, until - s.started))));
  }
  if (!goes_on(s))
    for (const auto& [label, value] : summary_lines(job.summary)) row(label.c_str(), value);
  for (const std::string& w : s.warnings) row("warned", w);
  for (const std::string& w : warnings_of_before(s)) row("earlier", w);
  return text;
}

std::string table_of_jobs(const std::vector<KnownJob>& jobs, double now) {
  std::size_t path = 4, state = 5, done = 4;
  std::vector<std::array<std::string, 3>> cells;
  for (const KnownJob& j : jobs) {
    const JobStatus& s = j.status;
    cells.push_back({printable(j.path.string()), printable(state_text(s)),
                     printable(share_text(s) + " " + s.noun + "s")});
    path = std::max(path, cells.back()[0].size());
    state = std::max(state, cells.back()[1].size());
    done = std::max(done, cells.back()[2].size());
  }
  std::string text;
  for (std::size_t i = 0; i < jobs.size(); ++i) {
    const JobStatus& s = jobs[i].status;
    std::string rest = pace_text(s);
    const auto add = [&](const std::string& more) { rest += (rest.empty() ? "" : ", ") + more; };
    for (const auto& [name, value] : s.values) add(fmt::format("{} {:.4g}", label_of(name), value));
    if (!goes_on(s) && s.state != "silent")
      add(duration_text(std::max(0.0, now - s.updated)) + " ago");
    if (!s.error.empty()) add(s.error);
    std::string line =
        fmt::format("{:<{}}  {:<11}  {:<{}}  {:<{}}  {}", cells[i][0], path, printable(s.command),
                    cells[i][1], state, cells[i][2], done, printable(rest, 2000));
    line.erase(line.find_last_not_of(' ') + 1);
    text += line + "\n";
  }
  return text;
}

Json json_of(const KnownJob& job, double now) {
  const JobStatus& s = job.status;
  Json j = {{"path", job.path.string()},
            {"command", s.command},
            {"state", s.state},
            {"unit", s.noun},
            {"done", s.done},
            {"total", s.total},
            {"done_before", s.before},
            {"ranks", s.ranks}};
  if (s.rate > 0) j["rate"] = s.rate;
  if (goes_on(s) && s.left > 0) j["seconds_left"] = s.left;
  for (const auto& [name, value] : s.values) j[name] = value;
  if (!job.checkpoint.empty()) j["checkpoint"] = job.checkpoint;
  if (s.started > 0) j["started"] = s.started;
  j["updated"] = s.updated;
  j["seconds_since_update"] = std::max(0.0, now - s.updated);
  if (has_advanced(s)) j["seconds_since_item"] = std::max(0.0, now - s.advanced);
  if (!s.host.empty()) j["host"] = s.host;
  if (s.state != "running" && s.state != "silent") j["exit_code"] = s.code;
  if (!s.error.empty()) j[s.state == "finished" ? "reason" : "error"] = s.error;
  if (!goes_on(s) && job.summary.is_object()) {
    j["summary"] = job.summary;
    for (const auto& [label, value] : summary_lines(job.summary))
      j["last_lines"].push_back(fmt::format("{:<9} {}", label, value));
  }
  j["warnings"] = s.warnings;
  j["earlier_warnings"] = warnings_of_before(s);
  return j;
}

std::string jobs_as_json(const std::vector<KnownJob>& jobs, double now) {
  Json all = Json::array();
  for (const KnownJob& job : jobs) all.push_back(json_of(job, now));
  return dump_json(all, 2, ' ', false, Json::error_handler_t::replace) + "\n";
}

namespace {

// Until all jobs have ended. Ctrl-C ends it before. Returns 1 if any has failed.
int follow(const std::vector<std::string>& paths) {
  Follower follower({paths.begin(), paths.end()});
  for (bool first = true;; first = false, std::this_thread::sleep_for(std::chrono::seconds(1))) {
    fmt::print("{}", follower.poll(seconds_since_1970()));
    std::fflush(stdout);
    if (follower.ended()) return follower.failed() ? 1 : 0;
    if (!first) continue;
    std::error_code none;
    for (const fs::path& path : follower.waiting())
      log::info("no job has begun its work in {} yet{}: waiting, until Ctrl-C",
                fs::absolute(path).lexically_normal().string(),
                fs::exists(path, none) ? "" : ", which does not exist");
  }
}

int show(const std::vector<std::string>& paths, bool as_json) {
  const double now = seconds_since_1970();
  std::vector<KnownJob> jobs;
  for (const std::string& path : paths) {
    std::vector<KnownJob> found = find_jobs(path, now);
    WEFT_CHECK(!found.empty(), Exit::data,
               "name a run directory, the folder of a job's results, or the file that it writes; a "
               "job has a status once it has begun its work",
               "{} holds no job's status", path);
    std::move(found.begin(), found.end(), std::back_inserter(jobs));
  }
  fmt::print("{}", as_json            ? jobs_as_json(jobs, now)
                   : jobs.size() == 1 ? describe_job(jobs.front(), now)
                                      : table_of_jobs(jobs, now));
  return 0;
}

}  // namespace

Command status_command() {
  struct Options {
    std::vector<std::string> paths;
    bool json = false, follow = false;
  };
  const auto o = std::make_shared<Options>();
  Command c{"status", "show the progress of jobs from their files: state, remaining time, warnings",
            [o](const Deck&, MPI_Comm) {
              WEFT_CHECK(!o->json || !o->follow, Exit::usage, "leave one of them out",
                         "--json and --follow cannot be combined");
              if (o->paths.empty()) o->paths = {"."};
              return o->follow ? follow(o->paths) : show(o->paths, o->json);
            }};
  c.first_rank_only = true;
  c.path("paths", o->paths,
         "run directories, results of jobs, or folders that contain them; without any, the "
         "current one");
  c.option("--json", o->json, "as JSON: a list of jobs");
  c.option(
      "--follow", o->follow,
      "print new steps as the log has them, warnings and checkpoints, until the jobs have ended");
  return c;
}

}  // namespace weft
