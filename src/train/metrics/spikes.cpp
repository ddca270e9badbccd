#include "train/metrics/spikes.h"

#include <algorithm>
#include <cmath>

namespace weft {
namespace {

double median_of(std::vector<double>& v) {
  const auto middle = v.begin() + static_cast<std::ptrdiff_t>(v.size() / 2);
  std::nth_element(v.begin(), middle, v.end());
  return *middle;
}

}  // namespace

std::optional<SpikeWatch::Spike> SpikeWatch::step(double value) {
  std::optional<Spike> spike;
  if (recent_.size() >= least) {
    std::vector<double> v = recent_;
    const double median = median_of(v);
    for (double& x : v) x = std::abs(x - median);
    // 1.4826 makes a normal distribution's standard deviation of its median absolute deviation.
    const double deviation = std::max(1.4826 * median_of(v), 0.05 * std::abs(median));
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

}  // namespace weft
