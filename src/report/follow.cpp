#include "report/follow.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <system_error>
#include <utility>

#include "config/deck.h"
#include "core/error.h"
#include "core/json.h"
#include "core/log.h"
#include "report/html.h"
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

// The members of a line of metrics.jsonl that a log shows.
StepMetrics step_of_line(const json& line, std::int64_t step) {
  StepMetrics m;
  m.step = step;
  m.loss = number_of(line, "loss");
  m.grad_norm = number_of(line, "grad_norm");
  m.lr = number_of(line, "lr");
  m.seconds = number_of(line, "seconds");
  if (const auto terms = line.find("terms"); terms != line.end() && terms->is_object())
    m.terms.emplace_back("mae", number_of(*terms, "mae"));
  const auto split = line.find("split");
  if (split != line.end() && split->is_object())
    for (const auto& [key, seconds] : {std::pair{"data_wait", &m.split.data_wait},
                                       {"comm_exposed", &m.split.comm_exposed},
                                       {"wait_slowest", &m.split.wait_slowest},
                                       {"checkpoint", &m.split.checkpoint}})
      if (const double given = number_of(*split, key); std::isfinite(given)) *seconds = given;
  const auto wait = line.find("rank_wait");
  if (wait != line.end() && wait->is_array())
    for (const json& s : *wait) m.rank_wait.push_back(s.is_number() ? s.get<float>() : 0);
  else if (wait != line.end() && std::isfinite(number_of(*wait, "mean")))
    m.rank_wait = {static_cast<float>(number_of(*wait, "mean"))};
  // A line has figures of only some of many ranks: it names the slowest of several.
  const auto busy = line.find("rank_busy");
  if (busy != line.end() && busy->size() > 1) {
    m.rank_busy.resize(2);
    const double slowest = number_of(line, "slowest_rank");
    m.slowest_rank = slowest >= 0 && slowest < 1 << 30 ? static_cast<int>(slowest) : -1;
  }
  return m;
}

// What happened at a step, to be printed in the order of steps.
using Events = std::vector<std::pair<std::int64_t, std::string>>;

// `text` adds what a line of that step tells. Damaged lines are left out.
template <class Text>
void add_events(Events& events, const std::vector<std::string>& lines, const Text& text) {
  for (const std::string& line : lines) {
    const json j = parse_step_line(line);
    if (!j.is_discarded()) text(j, j["step"].get<std::int64_t>(), events);
  }
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
      if (!has_ended(f.job) && f.job.measured)
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
  const bool changed = again || s.state != f.state;
  const std::string line = table_of_jobs({f.job}, now);
  f.state = s.state;
  f.started = s.started;
  if (first || again) f.log_every = steps_a_line(f.job.path);
  if (again) {
    f.done = s.before;
    f.unprinted.clear();
    f.warnings.clear();
    f.metrics.rewind();
    f.validation.rewind();
  }
  if (s.command != "train") {
    const bool tells = changed || s.done != f.done;
    f.done = s.done;
    std::string text;
    for (const std::string& w : new_warnings(std::exchange(f.warnings, s.warnings), s.warnings))
      text += "WARN: " + printable(w, 2000) + "\n";
    return text + (tells ? line : "");
  }
  if (first && has_ended(f.job)) {
    f.done = s.done;
    f.checkpoint = f.job.checkpoint;
    f.warnings = s.warnings;
    return line;
  }
  // Warnings of before stand above the steps, as all that was before.
  std::string before;
  if (first)
    for (const std::string& w : f.warnings = s.warnings)
      before += "warned    " + printable(w, 2000) + "\n";
  const std::string steps = new_lines_of_training(f, first);
  // How it begins stands above its steps, how it ends below them.
  const bool above = first || again || s.state == "running";
  return (changed && above ? line : "") + before + steps + (changed && !above ? line : "");
}

std::string Follower::new_lines_of_training(Followed& f, bool first) {
  const JobStatus& s = f.job.status;
  Events events;
  std::int64_t done = f.done;
  add_events(events, f.metrics.take(), [&](const json& j, std::int64_t step, Events& to) {
    if (step + 1 <= done) return;  // of the start before
    done = step + 1;
    std::string line = step_text(step_of_line(j, step), s.total);
    if (s.rate > 0 && done < s.total)
      line += ", " + duration_text(static_cast<double>(s.total - done) / s.rate) + " left";
    const bool logged = done % f.log_every == 0;
    if (logged) to.emplace_back(done, line);
    f.unprinted = logged ? "" : std::move(line);
  });
  f.done = done;
  // A log ends with the last step.
  if (has_ended(f.job) && !f.unprinted.empty())
    events.emplace_back(done, std::exchange(f.unprinted, ""));
  if (first && events.size() > steps_at_first)
    events.erase(events.begin(), events.end() - steps_at_first);
  const std::int64_t oldest = events.empty() ? done : events.front().first;
  add_events(events, f.validation.take(), [&](const json& j, std::int64_t step, Events& to) {
    if (!first || step >= oldest)
      to.emplace_back(step,
                      fmt::format("held out  step {}: loss {:.5f}", step, number_of(j, "loss")));
  });
  std::ranges::stable_sort(events, {}, &Events::value_type::first);
  std::string text;
  for (const auto& [step, event] : events) text += event + "\n";
  if (f.job.checkpoint != f.checkpoint && !f.job.checkpoint.empty())
    text += fmt::format("saved     {}\n", printable(f.job.checkpoint));
  f.checkpoint = f.job.checkpoint;
  for (const std::string& w : new_warnings(std::exchange(f.warnings, s.warnings), s.warnings))
    text += "WARN: " + printable(w, 2000) + "\n";
  return text;
}

}  // namespace weft
