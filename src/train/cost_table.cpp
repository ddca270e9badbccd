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
// Earlier measurements weigh as much as this many at most: enough to smooth noise, few enough to
// follow a drift.
constexpr double memory = 64;
constexpr const char* title = "weft costs 2";

[[noreturn]] void damaged(const std::string& line) {
  throw Error(Exit::checkpoint,
              fmt::format("the costs of micro-batches cannot be read: \"{}\"", line),
              "resume from an older checkpoint, or start a new run with run.resume = false",
              __FILE__, __LINE__);
}

}  // namespace

CostTable::CostTable(std::vector<Planned> buckets)
    : planned_(std::move(buckets)),
      seconds_(planned_.size(), 0.0),
      weight_(planned_.size(), 0.0),
      sums_(2 * planned_.size(), 0.0),
      met_(planned_.size(), false) {
  WEFT_ASSERT(!planned_.empty());
  for (const Planned& p : planned_) WEFT_ASSERT(p.cost >= 0 && std::isfinite(p.cost));
}

double CostTable::expected(int bucket) const {
  const auto b = static_cast<std::size_t>(bucket);
  if (seconds_[b] > 0) return seconds_[b];
  double seconds = 0, planned = 0;
  for (std::size_t i = 0; i < planned_.size(); ++i) {
    if (seconds_[i] <= 0) continue;
    seconds += seconds_[i];
    planned += planned_[i].cost;
  }
  return planned_[b].cost * (planned > 0 ? seconds / planned : 1);
}

void CostTable::measured(int bucket, double seconds) {
  const auto b = static_cast<std::size_t>(bucket);
  const bool first = !met_[b];
  met_[b] = true;
  // The first run pays for first touches of memory and caches.
  if (first || !(seconds > 0)) return;
  // Sums speeds, not times: a micro-batch that took ten times as long then counts as a tenth of an
  // undisturbed one; in a mean of times it would count as ten.
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

void CostTable::agree(const std::vector<double>& sums) {
  WEFT_ASSERT(sums.size() == 2 * planned_.size());
  for (std::size_t b = 0; b < planned_.size(); ++b) {
    const double speeds = sums[2 * b], count = sums[2 * b + 1];
    if (!(count > 0) || !(speeds > 0) || !std::isfinite(speeds)) continue;
    const double known = std::min(weight_[b], memory);
    // count / speeds is the harmonic mean of this exchange's times.
    seconds_[b] = (known * seconds_[b] + count * (count / speeds)) / (known + count);
    weight_[b] = known + count;
  }
}

// The title, the number of buckets, and a line for each: clips, cost, seconds and weight. Numbers
// are written so that they read back to the same bits.
std::string CostTable::to_text() const {
  std::string text = fmt::format("{}\n{}\n", title, planned_.size());
  for (std::size_t b = 0; b < planned_.size(); ++b)
    text +=
        fmt::format("{} {} {} {}\n", planned_[b].clips, planned_[b].cost, seconds_[b], weight_[b]);
  return text;
}

CostTable::Noted CostTable::read(const std::string& text, std::size_t buckets) {
  std::istringstream lines(text);
  std::string line;
  if (!std::getline(lines, line) || line != title) damaged(line);
  if (!std::getline(lines, line)) damaged("");
  std::size_t noted = 0;
  if (!(std::istringstream(line) >> noted)) damaged(line);
  WEFT_CHECK(
      noted == buckets, Exit::checkpoint,
      "resume with the data that the run was started with, or start a new run (run.resume = false)",
      "the checkpoint stores costs for {} buckets, the data has {}", noted, buckets);
  const auto is_time = [](double v) { return v >= 0 && std::isfinite(v); };
  Noted n{std::vector<Planned>(buckets), std::vector<double>(buckets),
          std::vector<double>(buckets)};
  for (std::size_t b = 0; b < buckets; ++b) {
    if (!std::getline(lines, line)) damaged("");
    std::istringstream numbers(line);
    if (!(numbers >> n.planned[b].clips >> n.planned[b].cost >> n.seconds[b] >> n.weight[b]) ||
        !is_time(n.planned[b].cost) || !is_time(n.seconds[b]) || !is_time(n.weight[b]))
      damaged(line);
  }
  return n;
}

void CostTable::from_text(const std::string& text) {
  Noted n = read(text, planned_.size());
  bool same_batches = true;
  for (std::size_t b = 0; b < planned_.size(); ++b) {
    if (n.planned[b].clips == planned_[b].clips) continue;
    same_batches = false;
    n.seconds[b] = n.weight[b] = 0;  // measured on micro-batches of another size
  }
  // The run keeps the costs it started with, so that a restart places micro-batches as before.
  if (same_batches) planned_ = std::move(n.planned);
  seconds_ = std::move(n.seconds);
  weight_ = std::move(n.weight);
}

std::vector<double> CostTable::seconds_in(const std::string& text, std::size_t buckets) {
  return read(text, buckets).seconds;
}

}  // namespace weft
