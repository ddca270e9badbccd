#include "train/metrics/watches.h"

#include <algorithm>
#include <cmath>

#include "core/clock.h"

namespace weft {

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
  if (pace.size() < 2) return news;
  std::sort(pace.begin(), pace.end());
  for (std::size_t i = 0; i < pace.size(); ++i) {
    const int number = pace[i].second;
    Rank& r = ranks_[static_cast<std::size_t>(number)];
    const double against = pace[i].first - median_of_others(pace, i);
    if (r.recent.size() < window)
      r.recent.push_back(against);
    else
      r.recent[r.next] = against;
    r.next = (r.next + 1) % window;
    if (r.recent.size() < least) continue;
    const Middle m = middle_of(r.recent);
    const double slower = std::exp(m.mean);
    if (!r.slow && slower > 1 + threshold && m.mean > clear_by * m.error) {
      r.slow = true;
      news.push_back({number, slower, false});
    } else if (r.slow && slower < 1 + recovered_at) {
      r.slow = false;
      news.push_back({number, slower, true});
    }
  }
  std::sort(news.begin(), news.end(),
            [](const Verdict& a, const Verdict& b) { return a.rank < b.rank; });
  return news;
}

}  // namespace weft
