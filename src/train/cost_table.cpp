// Costs are versions with the step from which they hold. An exchange makes a new one that holds only behind the horizon, so
// that a placement already made (the prefetcher reads ahead) can never change.
#include "train/cost_table.h"

#include <algorithm>
#include <cmath>
#include <sstream>
#include <utility>

#include "core/error.h"

namespace weft {
namespace {

constexpr std::int64_t warm_up = 32;   // steps whose powers of two are exchanges
constexpr std::int64_t interval = 50;  // steps between exchanges afterwards
// What was known counts as this many measurements at most: enough to smooth noise, few enough to follow a drift.
constexpr double memory = 64;
constexpr const char* title = "weft costs 1";

}  // namespace

CostTable::CostTable(int buckets, std::function<double(int bucket)> planned, bool deterministic,
                     std::int64_t horizon)
    : deterministic_(deterministic),
      horizon_(horizon),
      sums_(static_cast<std::size_t>(2 * buckets), 0.0),
      met_(static_cast<std::size_t>(buckets), false) {
  WEFT_ASSERT(buckets >= 1 && horizon >= 0);
  for (int b = 0; b < buckets; ++b) {
    planned_.push_back(planned(b));
    WEFT_ASSERT(planned_.back() >= 0 &&
                std::isfinite(planned_.back()));  // 0: a bucket without clips
  }
}

double CostTable::cost(int bucket, std::int64_t step) const {
  return deterministic_ ? planned_[static_cast<std::size_t>(bucket)] : expected(bucket, step);
}

double CostTable::expected(int bucket, std::int64_t step) const {
  const auto b = static_cast<std::size_t>(bucket);
  const Version* holds = nullptr;
  for (const Version& v : versions_)
    if (v.from_step <= step) holds = &v;
  if (holds == nullptr) return planned_[b];
  return holds->seconds[b] > 0 ? holds->seconds[b] : holds->scale * planned_[b];
}

void CostTable::measured(int bucket, double seconds) {
  const auto b = static_cast<std::size_t>(bucket);
  const bool first = !met_[b];
  met_[b] = true;
  if (first || !(seconds > 0)) return;
  // Speeds are summed, not times: a micro-batch that something held up tenfold then counts as a tenth of one that nothing
  // did, where a mean of times would count it as ten.
  sums_[2 * b] += 1 / seconds;
  sums_[2 * b + 1] += 1;
}

bool CostTable::due(std::int64_t step) const {
  const std::int64_t done = step + 1;
  const bool power_of_two = (done & (done - 1)) == 0;
  return (done >= 4 && done <= warm_up && power_of_two) || done % interval == 0;
}

std::vector<double> CostTable::take() {
  return std::exchange(sums_, std::vector<double>(sums_.size(), 0.0));
}

void CostTable::agree(std::int64_t step, const std::vector<double>& sums) {
  WEFT_ASSERT(sums.size() == 2 * planned_.size());
  const std::int64_t from_step = step + 1 + horizon_;
  const std::vector<double> none(planned_.size(), 0.0);
  Version next = versions_.empty() ? Version{0, none, none, 1} : versions_.back();
  next.from_step = from_step;
  bool news = false;
  for (std::size_t b = 0; b < planned_.size(); ++b) {
    const double speeds = sums[2 * b], count = sums[2 * b + 1];
    if (!(count > 0) || !(speeds > 0) || !std::isfinite(speeds)) continue;
    const double mean = count / speeds, known = std::min(next.weight[b], memory);
    next.seconds[b] = (known * next.seconds[b] + count * mean) / (known + count);
    next.weight[b] = known + count;
    news = true;
  }
  if (!news) return;
  set_scale(next);
  // After a restart with a shorter horizon, a version of before may lie further ahead; nothing has been placed by it yet.
  std::erase_if(versions_, [&](const Version& v) { return v.from_step >= from_step; });
  versions_.push_back(std::move(next));
  // Nobody asks for steps before this one any more: of the versions that hold for it, the newest is enough.
  while (versions_.size() >= 2 && versions_[1].from_step <= step)
    versions_.erase(versions_.begin());
}

void CostTable::set_scale(Version& v) const {
  double seconds = 0, planned = 0;
  for (std::size_t b = 0; b < planned_.size(); ++b) {
    if (v.seconds[b] <= 0) continue;
    seconds += v.seconds[b];
    planned += planned_[b];
  }
  v.scale = planned > 0 ? seconds / planned : 1;
}

// One line each: the title, the estimates, then a version a line as its first step and pairs of seconds and weight. Numbers
// are written so that they read back to the same bits.
std::string CostTable::to_text() const {
  std::string text = fmt::format("{}\n{}", title, planned_.size());
  for (const double p : planned_) text += fmt::format(" {}", p);
  text += '\n';
  for (const Version& v : versions_) {
    text += fmt::format("{}", v.from_step);
    for (std::size_t b = 0; b < planned_.size(); ++b)
      text += fmt::format(" {} {}", v.seconds[b], v.weight[b]);
    text += '\n';
  }
  return text;
}

void CostTable::from_text(const std::string& text) {
  const auto damaged = [](const std::string& line) {
    throw Error(Exit::checkpoint,
                fmt::format("the costs of micro-batches cannot be read: \"{}\"", line),
                "go on from an older checkpoint, or start anew with run.resume = false", __FILE__,
                __LINE__);
  };
  std::istringstream lines(text);
  std::string line;
  if (!std::getline(lines, line) || line != title) damaged(line);
  if (!std::getline(lines, line)) damaged("");
  std::istringstream estimates(line);
  std::size_t buckets = 0;
  if (!(estimates >> buckets)) damaged(line);
  WEFT_CHECK(
      buckets == planned_.size(), Exit::checkpoint,
      "go on with the data that the run was started with, or start anew (run.resume = false)",
      "the checkpoint's costs are of {} buckets, the data has {}", buckets, planned_.size());
  std::vector<bool> same;
  for (const double now : planned_) {
    double then = 0;
    if (!(estimates >> then)) damaged(line);
    same.push_back(std::abs(then - now) <= 1e-6 * now);
  }
  std::vector<Version> versions;
  while (std::getline(lines, line)) {
    Version v;
    std::istringstream numbers(line);
    if (!(numbers >> v.from_step)) damaged(line);
    for (std::size_t b = 0; b < buckets; ++b) {
      double seconds = 0, weight = 0;
      if (!(numbers >> seconds >> weight) || !(seconds >= 0) || !(weight >= 0)) damaged(line);
      v.seconds.push_back(same[b] ? seconds : 0);
      v.weight.push_back(same[b] ? weight : 0);
    }
    if (!versions.empty() && versions.back().from_step >= v.from_step) damaged(line);
    set_scale(v);
    versions.push_back(std::move(v));
  }
  versions_ = std::move(versions);
}

}  // namespace weft
