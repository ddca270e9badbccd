#include "report/follow.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <nlohmann/json.hpp>
#include <system_error>
#include <utility>

#include "config/deck.h"
#include "core/error.h"
#include "core/json.h"
#include "core/log.h"
#include "report/page.h"
#include "train/metrics/metrics.h"

namespace weft {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr int polls_between_searches = 10;
constexpr std::size_t steps_at_first = 10;

// The run's own log has a line every so many steps.
std::int64_t steps_a_line(const fs::path& run) {
  try {
    return parse_deck(report_page::read_text(run / "deck.toml"), "deck.toml", {}).train.log_every;
  } catch (const Error&) {
    return 1;  // of another weft
  }
}

// What happened, by steps done.
using Events = std::multimap<std::int64_t, std::string>;

// The new whole lines by step; damaged ones are left out.
std::vector<json> step_lines(FileTail& file) {
  std::vector<json> lines;
  for (const std::string& line : file.take())
    if (json j = parse_step_line(line); !j.is_discarded()) lines.push_back(std::move(j));
  return lines;
}

// The warnings that follow those of before, which may have dropped out at the front.
std::vector<std::string> new_warnings(const std::vector<std::string>& before,
                                      const std::vector<std::string>& now) {
  std::size_t same = std::min(before.size(), now.size());
  while (!std::equal(now.begin(), now.begin() + static_cast<std::ptrdiff_t>(same),
                     before.end() - static_cast<std::ptrdiff_t>(same)))
    --same;
  return {now.begin() + static_cast<std::ptrdiff_t>(same), now.end()};
}

}  // namespace

std::vector<std::string> FileTail::take() {
  constexpr std::uint64_t most_at_first = 256 << 10;
  // Opened anew each time: that is when network file systems look for what others have written.
  std::ifstream in = report_page::open_regular(path_);
  const bool first = !std::exchange(begun_, true);
  if (!in.is_open()) {
    at_ = 0;
    return {};
  }
  in.seekg(0, std::ios::end);
  const auto size = static_cast<std::uint64_t>(in.tellg());
  bool within = false;  // a line
  if (first || size < at_) {
    at_ = size - std::min(size, most_at_first);
    within = at_ > 0;
  }
  std::string text(size - at_, '\0');
  in.seekg(static_cast<std::streamoff>(at_));
  in.read(text.data(), static_cast<std::streamsize>(text.size()));
  text.resize(static_cast<std::size_t>(std::max<std::streamsize>(0, in.gcount())));
  std::vector<std::string> lines;
  std::size_t begin = 0;
  for (std::size_t end; (end = text.find('\n', begin)) != std::string::npos; begin = end + 1)
    if (!std::exchange(within, false)) lines.push_back(text.substr(begin, end - begin));
  at_ += begin;
  return lines;
}

Follower::Followed::Followed(KnownJob known)
    : job(std::move(known)),
      metrics(job.path / "metrics.jsonl"),
      validation(job.path / "validation.jsonl") {}

bool Follower::has_ended(const KnownJob& job) {
  const std::string& s = job.status.state;
  return s == "finished" || s == "stopped" || s == "failed";
}

bool Follower::ended() const {
  return waiting_.empty() &&
         std::ranges::all_of(jobs_, [](const auto& named) { return has_ended(named.second.job); });
}

bool Follower::failed() const {
  return lost_any_ || std::ranges::any_of(jobs_, [](const auto& named) {
           return named.second.job.status.state == "failed";
         });
}

std::string Follower::drop_gone(double now) {
  std::string text;
  for (auto it = jobs_.begin(); it != jobs_.end();) {
    const auto& [path, f] = *it;
    // The file that a job writes comes after its status; a path that cannot be looked at for a
    // while is not gone.
    std::error_code none;
    if (fs::status(path, none).type() != fs::file_type::not_found || find_job(path, now)) {
      ++it;
      continue;
    }
    text += printable(path.string()) + "  was removed; no longer followed\n";
    lost_any_ = lost_any_ || !has_ended(f.job) || f.job.status.state == "failed";
    it = jobs_.erase(it);
  }
  return text;
}

std::string Follower::poll(double now) {
  if (polls_++ % polls_between_searches == 0) {
    for (const fs::path& path : paths_)
      for (KnownJob& job : find_jobs(path, now)) {
        waiting_.erase(path);
        const auto [at, is_new] = jobs_.try_emplace(job.path, job);
        if (!is_new) at->second.job = std::move(job);
      }
  } else {
    // What has ended may be started again: the next search sees it.
    for (auto& [path, f] : jobs_)
      if (!has_ended(f.job))
        if (auto job = find_job(path, now)) f.job = std::move(*job);
  }
  std::string text = drop_gone(now);
  for (auto& [path, f] : jobs_) {
    const std::string lines = new_lines(f, now);
    if (jobs_.size() == 1 || lines.empty()) {
      text += lines;
      continue;
    }
    // Each line says which of several jobs it is of.
    const std::string name = printable(path.string()) + "  ";
    for (std::size_t begin = 0, end; begin < lines.size(); begin = end + 1) {
      end = lines.find('\n', begin);
      const std::string line = lines.substr(begin, end - begin);
      text += (line.starts_with(name) ? "" : name) + line + "\n";
    }
  }
  return text;
}

std::string Follower::new_lines(Followed& f, double now) {
  const JobStatus& s = f.job.status;
  const bool first = f.state.empty(), again = !first && s.started != f.started;
  const bool changed = again || s.state != f.state, training = s.command == "train";
  const std::string line = table_of_jobs({f.job}, now);
  f.state = s.state;
  f.started = s.started;
  if (training && (first || again)) f.log_every = steps_a_line(f.job.path);
  if (again) {
    f.done = s.before;
    f.unprinted.clear();
    f.warnings.clear();
    f.metrics.rewind();
    f.validation.rewind();
  }
  // Warnings of before stand above the steps of a training, as all that was before.
  const bool before = training && first;
  std::string warnings;
  for (const std::string& w : new_warnings(std::exchange(f.warnings, s.warnings), s.warnings))
    warnings += (before ? "warned    " : "WARN: ") + printable(w, 2000) + "\n";
  if (!training) {
    const bool tells = std::exchange(f.done, s.done) != s.done || changed;
    return warnings + (tells ? line : "");
  }
  if (first && has_ended(f.job)) {
    f.done = s.done;
    f.checkpoint = f.job.checkpoint;
    return line;
  }
  const std::string steps = new_steps(f, first);
  const std::string news = before ? warnings + steps : steps + warnings;
  if (!changed) return news;
  // How it begins stands above its steps, how it ends below them.
  return first || again || s.state == "running" ? line + news : news + line;
}

std::string Follower::new_steps(Followed& f, bool first) {
  const JobStatus& s = f.job.status;
  Events events;
  for (const json& j : step_lines(f.metrics)) {
    const std::int64_t done = j["step"].get<std::int64_t>() + 1;
    if (done <= f.done) continue;  // of the start before
    f.done = done;
    std::string line = step_text(j, s.total);
    if (s.rate > 0 && done < s.total)
      line += ", " + duration_text(static_cast<double>(s.total - done) / s.rate) + " left";
    const bool logged = done % f.log_every == 0;
    if (logged) events.emplace(done, line);
    f.unprinted = logged ? "" : std::move(line);
  }
  // A log ends with the last step.
  if (has_ended(f.job) && !f.unprinted.empty())
    events.emplace(f.done, std::exchange(f.unprinted, ""));
  if (first && events.size() > steps_at_first)
    events.erase(events.begin(), std::prev(events.end(), steps_at_first));
  const std::int64_t oldest = events.empty() ? f.done : events.begin()->first;
  for (const json& j : step_lines(f.validation))
    if (const std::int64_t step = j["step"]; !first || step >= oldest)
      events.emplace(step,
                     fmt::format("held out  step {}: loss {:.5f}", step, number_of(j, "loss")));
  std::string text;
  for (const auto& [step, event] : events) text += event + "\n";
  if (f.job.checkpoint != f.checkpoint && !f.job.checkpoint.empty())
    text += fmt::format("saved     {}\n", printable(f.job.checkpoint));
  f.checkpoint = f.job.checkpoint;
  return text;
}

}  // namespace weft
