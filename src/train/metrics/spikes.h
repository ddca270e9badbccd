// Finds values that leap: a loss or a gradient norm far above those of the steps before. Pure arithmetic on figures that every
// rank has alike.
#pragma once

#include <cstddef>
#include <optional>
#include <vector>

namespace weft {

class SpikeWatch {
 public:
  static constexpr std::size_t window = 64;  // values that a new one is compared with
  static constexpr std::size_t least = 32;   // with fewer nothing is judged

  // A spike lies more than `deviations` above the median. A deviation is that of a normal distribution with the window's median
  // absolute deviation, and at least a twentieth of the median: losses that hardly vary must not make much of little.
  explicit SpikeWatch(double deviations) : deviations_(deviations) {}

  struct Spike {
    double median, deviations;  // of the values before; how far above it
  };
  // The next value. Of several spikes in a row the first alone is told. All values enter the window, so that a
  // lasting change of level is soon taken for granted.
  std::optional<Spike> step(double value);

 private:
  double deviations_;
  std::vector<double> recent_;  // a ring of `window`
  std::size_t next_ = 0;
  bool within_ = false;  // the last value was a spike
};

}  // namespace weft
