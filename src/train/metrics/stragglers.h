// Finds ranks that are constantly slower than the others. Pure arithmetic on figures that every rank has: no
// communication.
#pragma once

#include <span>
#include <vector>

namespace weft {

// A rank's pace in a step is its busy time over what the plan expected of it. Each rank is compared with the median of
// all others' paces (not of all: of two ranks the median would be half the slow one itself), the middle of its last
// `window` comparisons is averaged, and a rank is slow when that exceeds `threshold` and stands clear of its own
// scatter.
class StragglerWatch {
 public:
  static constexpr int window = 16;             // steps with work
  static constexpr double threshold = 0.105;    // slower than the others by this share: reported
  static constexpr double recovered_at = 0.05;  // a reported rank has recovered below this

  struct Verdict {
    int rank;
    double slower;           // against the median of the others: 1.2 is 20 % slower
    bool recovered = false;  // it was reported before, and is so no longer
  };

  explicit StragglerWatch(int ranks);

  // Each step: busy seconds of every rank and what the plan expected of each, in any unit; 0 for a rank without work,
  // which is then not judged. Expectations should be measured: a cost table that is wrong by a tenth for a bucket that
  // always falls to the same rank looks like a slow rank. Returns news only: each straggler once, and again only after
  // a recovery.
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
