// What a micro-batch costs, agreed by all ranks: the planner's estimate until it has been measured, then the measured time.
// The step plan places micro-batches by it, longest first (data/step_plan.h), so every rank must use the same costs for the
// same step, however far ahead it reads.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace weft {

class CostTable {
 public:
  // `planned(bucket)`: the planner's estimate for a micro-batch of that bucket in any unit, 0 if it has no clips.
  // `deterministic`: that estimate alone places. `horizon`: how many steps ahead of the current one placements are asked for.
  CostTable(int buckets, std::function<double(int bucket)> planned, bool deterministic,
            std::int64_t horizon);

  // Cost of a micro-batch of `bucket` for placing `step`: in seconds once anything was measured. A bucket that nobody has
  // measured costs its estimate times what the measured ones took of theirs. Asked for steps from that of the last agree() on.
  double cost(int bucket, std::int64_t step) const;
  // What to expect of it: the same, but measured also where placements are deterministic (observe/stragglers.h).
  double expected(int bucket, std::int64_t step) const;

  // Notes a micro-batch's time on this rank. A bucket's first time here does not count: it touches memory and caches first.
  void measured(int bucket, double seconds);
  // After which steps the ranks exchange what they measured: often during warm-up, seldom later.
  // Depends on the step's number alone, so that a run that was restarted exchanges after the same steps.
  bool due(std::int64_t step) const;
  // What this rank adds to the exchange (2 numbers a bucket); forgets it.
  std::vector<double> take();
  // The sums over all ranks, after `step`: counts for steps from step + 1 + horizon on. Called in order of steps.
  void agree(std::int64_t step, const std::vector<double>& sums);

  // For checkpoints: everything that placements depend on, also those of steps already agreed for later ones.
  std::string to_text() const;
  // Exit::checkpoint if it cannot be read or is of other buckets (their number). Times of a bucket whose estimate has changed
  // since (another batch size, another share of recomputation) are left out.
  void from_text(const std::string& text);

 private:
  struct Version {
    std::int64_t from_step = 0;
    std::vector<double> seconds;  // [bucket], 0: not measured
    std::vector<double> weight;   // [bucket], measurements that `seconds` stands for
    double scale = 1;             // seconds a unit of the estimate
  };
  void set_scale(Version& v) const;

  std::vector<double> planned_;
  bool deterministic_;
  std::int64_t horizon_;
  std::vector<Version> versions_;  // in order of steps
  std::vector<double> sums_;  // [bucket][2] speeds (1/seconds) and their number, not exchanged yet
  std::vector<bool> met_;     // [bucket] measured here before
};

}  // namespace weft
