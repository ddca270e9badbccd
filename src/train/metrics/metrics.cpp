#include "train/metrics/metrics.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>
#include <numeric>
#include <utility>

#include "core/clock.h"
#include "core/error.h"
#include "core/file.h"
#include "core/hash.h"
#include "core/json.h"
#include "core/log.h"

namespace weft {

// ---- RUN/metrics.jsonl ----

namespace {

constexpr std::size_t most_ranks = 64;

// With `each` a step before `first_step` without a line is a WARN.
void drop_lines_from(const std::filesystem::path& path, std::int64_t first_step, bool each) {
  std::vector<bool> there(static_cast<std::size_t>(each ? first_step : 0));
  std::ifstream in(path);
  std::string kept;
  std::int64_t number = 0;
  for (std::string line; std::getline(in, line);) {
    ++number;
    const nlohmann::json j = parse_step_line(line);
    const bool whole = !j.is_discarded();
    if (!whole && !is_cut_off(line, in.eof()))
      log::warn("{}, line {} is damaged: it is left out", path.string(), number);
    if (!whole || j["step"].get<std::int64_t>() >= first_step) continue;
    kept += line + '\n';
    if (const auto step = j["step"].get<std::int64_t>(); each && step >= 0) there[step] = true;
  }
  // A kill meanwhile leaves the old lines whole.
  if (in.is_open()) replace_file(path, kept, Exit::checkpoint, Durable::no);
  const auto first = std::ranges::find(there, false);
  const auto end = std::find(there.rbegin(), there.rend(), false).base();
  if (first != there.end())
    log::warn("{} has no line of {} of the {} done (\"step\" {} to {}): curves have gaps",
              path.string(), std::ranges::count(there, false), counted(first_step, "step"),
              first - there.begin(), end - there.begin() - 1);
}

// Keeps lines short at any number of ranks: each rank's value up to `most_ranks`, beyond that only
// the range. Rounded to microseconds, which are enough.
nlohmann::ordered_json of_ranks(std::span<const float> seconds) {
  const auto rounded = [](float s) { return std::round(double{s} * 1e6) / 1e6; };
  auto j = nlohmann::ordered_json::array();
  if (seconds.size() <= most_ranks) {
    for (const float s : seconds) j.push_back(rounded(s));
    return j;
  }
  std::vector<float> sorted(seconds.begin(), seconds.end());
  std::sort(sorted.begin(), sorted.end());
  return {{"min", rounded(sorted.front())},
          {"median", rounded(sorted[sorted.size() / 2])},
          {"mean", rounded(static_cast<float>(mean_of(seconds)))},
          {"max", rounded(sorted.back())}};
}

}  // namespace

nlohmann::json parse_step_line(const std::string& line) {
  nlohmann::json j = try_parse_json(line);
  if (j.is_object() && j.contains("step") && j["step"].is_number_integer() && seal_holds(line))
    return j;
  return nlohmann::json(nlohmann::json::value_t::discarded);
}

std::string step_text(const StepMetrics& m, std::int64_t steps) {
  const auto share = [&](double s) { return 100 * s / m.seconds; };
  std::string slowest, mae;
  const double wait = m.rank_wait.empty() ? m.split.wait_slowest : mean_of(m.rank_wait);
  for (const auto& [name, value] : m.terms)
    if (name == "mae" && value > 0) mae = fmt::format("  MAE {:.2f}/255", value);
  if (m.rank_busy.size() > 1) slowest = fmt::format(", slowest rank {}", m.slowest_rank);
  return fmt::format(
      "step {:>6}/{}  loss {:.5f}{}  grad {:.3f}  lr {:.2e}  {:.3f} s  (data {:.1f} %, comm {:.1f} "
      "%, wait {:.1f} %, save {:.1f} %{})",
      m.step + 1, steps, m.loss, mae, m.grad_norm, m.lr, m.seconds, share(m.split.data_wait),
      share(m.split.comm_exposed), share(wait), share(m.split.checkpoint), slowest);
}

double mean_of(std::span<const float> v) {
  return std::accumulate(v.begin(), v.end(), 0.0) / static_cast<double>(v.size());
}

double spread_of(std::span<const float> busy) {
  if (busy.empty()) return 0;
  const double mean = mean_of(busy);
  return mean > 0 ? (*std::max_element(busy.begin(), busy.end()) - mean) / mean : 0;
}

StepLines::StepLines(std::filesystem::path path, std::int64_t first_step, bool each)
    : path_(std::move(path)) {
  drop_lines_from(path_, first_step, each);
  file_ = open(path_.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_NOFOLLOW | O_CLOEXEC, 0666);
  WEFT_CHECK(file_ >= 0, Exit::checkpoint, "check that run.dir can be written",
             "cannot open {}: {}", path_.string(), std::strerror(errno));
}

StepLines::~StepLines() {
  if (!flush())
    log::error("ERROR: the last lines of {} could not be written: {} bytes are missing",
               path_.string(), pending_.size());
  close(file_);
}

// Writes whole lines or nothing: if a full disk cuts a line off, truncates the file again and
// retries with the next line.
bool StepLines::flush() {
  const off_t before = lseek(file_, 0, SEEK_END);
  std::size_t written = 0;
  while (written < pending_.size()) {
    const ssize_t n = ::write(file_, pending_.data() + written, pending_.size() - written);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) {
      if (!failing_)
        log::warn("cannot write {}: {}; its lines are kept in memory until it works again",
                  path_.string(), std::strerror(errno));
      failing_ = true;
      // If even truncating fails, the retry goes on after the bytes that are in the file.
      if (written > 0 && ftruncate(file_, before) != 0) pending_.erase(0, written);
      return false;
    }
    written += static_cast<std::size_t>(n);
  }
  pending_.clear();
  failing_ = false;
  return true;
}

void StepLines::write(const std::string& object) {
  pending_ += seal_json(object) + '\n';
  flush();
}

MetricsWriter::MetricsWriter(const std::filesystem::path& run_dir, std::int64_t first_step)
    : run_dir_(run_dir),
      first_step_(first_step),
      metrics_(run_dir / "metrics.jsonl", first_step, true) {
  const std::filesystem::path layers = run_dir / "layer_norms.jsonl";
  if (is_there(layers, Exit::checkpoint)) layer_norms_.emplace(layers, first_step);
}

void MetricsWriter::write(const StepMetrics& m) {
  nlohmann::ordered_json j{
      {"step", m.step},
      {"loss", m.loss},
      {"grad_norm", m.grad_norm},
      {"lr", m.lr},
      {"seconds", m.seconds},
      {"split",
       {{"data_wait", m.split.data_wait},
        {"compute", m.split.compute},
        {"wait_slowest", m.split.wait_slowest},
        {"comm_exposed", m.split.comm_exposed},
        {"optimizer", m.split.optimizer},
        {"checkpoint", m.split.checkpoint}}},
      {"memory", {{"resident_bytes", m.resident_bytes}, {"arena_peak_bytes", m.arena_peak_bytes}}},
      {"samples", m.samples},
  };
  // Marks where the run was started, or went on.
  if (std::exchange(first_, false)) j["start"] = true;
  for (const auto& [name, value] : m.terms) j["terms"][name] = value;
  for (const StoreMetrics& s : m.stores) {
    j["stores"][s.name]["samples"] = s.samples;
    if (s.samples > 0) j["stores"][s.name]["loss"] = s.loss;
  }
  if (m.slowest_rank >= 0) {
    j["slowest_rank"] = m.slowest_rank;
    j["spread"] = m.spread;
    j["rank_busy"] = of_ranks(m.rank_busy);
    j["rank_wait"] = of_ranks(m.rank_wait);
    if (!m.rank_data_wait.empty()) j["rank_data_wait"] = of_ranks(m.rank_data_wait);
  }
  metrics_.write(dump_json(j));
  if (m.layer_norms.empty()) return;
  if (!layer_norms_) layer_norms_.emplace(run_dir_ / "layer_norms.jsonl", first_step_);
  nlohmann::ordered_json layers{{"step", m.step}};
  for (const auto& [layer, norm] : m.layer_norms) layers["norms"][layer] = norm;
  layer_norms_->write(dump_json(layers));
}

// ---- Watches ----

std::optional<SpikeWatch::Spike> SpikeWatch::step(double value) {
  std::optional<Spike> spike;
  if (recent_.size() >= least) {
    std::vector<double> v = recent_;
    const double median = upper_median(v);
    for (double& x : v) x = std::abs(x - median);
    // 1.4826: a normal distribution's standard deviation over its median absolute deviation.
    const double deviation = std::max(1.4826 * upper_median(v), 0.05 * std::abs(median));
    const double above = value - median;
    const bool is_spike = above > 0 && above > deviations_ * deviation;
    if (is_spike && !within_) spike = Spike{median, above / deviation};
    within_ = is_spike;
  }
  if (recent_.size() < window)
    recent_.push_back(value);
  else
    recent_[next_] = value;
  next_ = (next_ + 1) % window;
  return spike;
}

namespace {

// With fewer comparisons no rank is judged: the first steps of a run are unlike the others.
constexpr std::size_t least = 12;
// The mean must be this many of its standard errors above zero. With 4, bursts of load on a host of
// two ranks looked like a slow rank in 6 of 400 simulated runs of 1,000 steps; with 5 in none.
constexpr double clear_by = 6;

// Mean of the middle half, and its standard error from the same half: a few steps in which
// something else had the processor change neither. 0.74 converts the distance between a normal
// distribution's quartiles to its standard deviation; 1.09 is the loss from leaving out the outer
// half.
struct Middle {
  double mean, error;
};
Middle middle_of(std::vector<double> v) {
  std::sort(v.begin(), v.end());
  const std::size_t cut = v.size() / 4, n = v.size() - 2 * cut;
  double sum = 0;
  for (std::size_t i = cut; i < v.size() - cut; ++i) sum += v[i];
  const double quartiles = v[v.size() - 1 - cut] - v[cut];
  return {sum / static_cast<double>(n),
          1.09 * 0.74 * quartiles / std::sqrt(static_cast<double>(v.size()))};
}

// The median of `sorted` without its element `leave_out`; two at least.
double median_of_others(const std::vector<std::pair<double, int>>& sorted, std::size_t leave_out) {
  const auto other = [&](std::size_t i) { return sorted[i < leave_out ? i : i + 1].first; };
  const std::size_t n = sorted.size() - 1;
  return n % 2 == 1 ? other(n / 2) : (other(n / 2 - 1) + other(n / 2)) / 2;
}

}  // namespace

StragglerWatch::StragglerWatch(int ranks) : ranks_(static_cast<std::size_t>(ranks)) {}

std::vector<StragglerWatch::Verdict> StragglerWatch::step(std::span<const double> busy,
                                                          std::span<const double> expected) {
  // Logarithms, so that "twice as slow" and "twice as fast" weigh the same.
  std::vector<std::pair<double, int>> pace;
  for (std::size_t r = 0; r < ranks_.size(); ++r)
    if (expected[r] > 0 && busy[r] > 0 && std::isfinite(busy[r] / expected[r]))
      pace.emplace_back(std::log(busy[r] / expected[r]), static_cast<int>(r));
  std::vector<Verdict> news;
  ++steps_;
  if (pace.size() < 2) return news;
  std::sort(pace.begin(), pace.end());
  for (std::size_t i = 0; i < pace.size(); ++i) {
    const int number = pace[i].second;
    Rank& r = ranks_[number];
    const double against = pace[i].first - median_of_others(pace, i);
    if (r.recent.size() < window)
      r.recent.push_back(against);
    else
      r.recent[r.next] = against;
    r.next = (r.next + 1) % window;
    if (r.recent.size() < least) continue;
    const Middle m = middle_of(r.recent);
    const double slower = std::exp(m.mean);
    r.slow =
        r.slow ? slower >= 1 + recovered_at : slower > 1 + threshold && m.mean > clear_by * m.error;
    if (r.slow == r.reported || (r.slow && steps_ < r.silent_until)) continue;
    r.reported = r.slow;
    if (r.slow) r.silent_until = steps_ + quiet;
    news.push_back({number, slower, !r.slow});
  }
  std::sort(news.begin(), news.end(),
            [](const Verdict& a, const Verdict& b) { return a.rank < b.rank; });
  return news;
}

}  // namespace weft
