// Watches over figures that are the same on every rank, so that all reach the same verdict without
// communication: losses and gradient norms that leap, and ranks that are constantly slower than the
// others. Pure arithmetic.
#pragma once

#include <cstddef>
#include <optional>
#include <span>
#include <vector>

namespace weft {

class SpikeWatch {
 public:
  static constexpr std::size_t window = 64;  // values that a new one is compared with
  static constexpr std::size_t least = 32;   // values before the first judgement

  // A spike lies more than `deviations` above the median. A deviation is that of a normal
  // distribution with the window's median absolute deviation, and at least a twentieth of the
  // median: where losses hardly vary, a small change must not count as a spike.
  explicit SpikeWatch(double deviations) : deviations_(deviations) {}

  struct Spike {
    double median, deviations;  // of the values before; how far above it
  };
  // Adds the next value. Reports only the first of several spikes in a row. All values enter the
  // window, so that a lasting change of level soon counts as normal.
  std::optional<Spike> step(double value);

 private:
  double deviations_;
  std::vector<double> recent_;  // a ring of `window`
  std::size_t next_ = 0;
  bool within_ = false;  // the last value was a spike
};

// A rank's pace in a step is its busy time over what the plan expected of it. Each rank is compared
// with the median of all others' paces (not of all: of two ranks the median would be half the slow
// one itself), the middle of its last `window` comparisons is averaged, and a rank is slow when
// that exceeds `threshold` and stands clear of its own scatter.
class StragglerWatch {
 public:
  static constexpr int window = 16;             // steps with work
  static constexpr double threshold = 0.105;    // slower than the others by this share: reported
  static constexpr double recovered_at = 0.05;  // a reported rank has recovered below this

  struct Verdict {
    int rank;
    double slower;           // against the median of the others: 1.2 is 20 % slower
    bool recovered = false;  // it was reported before, and is slow no longer
  };

  explicit StragglerWatch(int ranks);

  // Each step: busy seconds of every rank and what the plan expected of each, in any unit; 0 for a
  // rank without work, which is then not judged. Expectations should be measured: a cost table that
  // is wrong by a tenth for a bucket that always falls to the same rank looks like a slow rank.
  // Returns news only: each straggler once, and again only after a recovery.
  std::vector<Verdict> step(std::span<const double> busy, std::span<const double> expected);

  bool slow(int rank) const { return ranks_[static_cast<std::size_t>(rank)].slow; }

 private:
  struct Rank {
    std::vector<double> recent;  // logarithms of the pace against the others', a ring of `window`
    std::size_t next = 0;
    bool slow = false;
  };
  std::vector<Rank> ranks_;
};

}  // namespace weft
