// The cost of a micro-batch of each bucket. Placements follow the planner's costs
// (data/step_plan.h, longest first). These are the same in every run, so runs on the same number of
// ranks repeat their bits. Measured times are kept beside them, to find slow ranks
// (train/metrics/metrics.h) and for `weft_simulate --costs`.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace weft {

class CostTable {
 public:
  struct Planned {
    std::int64_t clips = 0;  // of a micro-batch
    double cost = 0;         // in any unit; 0 if the bucket has no clips
  };
  explicit CostTable(std::vector<Planned> buckets);

  // For placing a micro-batch of `bucket`, in the planner's unit.
  double cost(int bucket) const { return planned_[bucket].cost; }
  // The seconds it takes, from the last exchange between the ranks; before the first one, the
  // planner's cost. A bucket without measurements is scaled by the measured buckets' seconds per
  // unit of cost.
  double expected(int bucket) const;
  // [bucket] Seconds measured over all ranks, 0 where there are none.
  const std::vector<double>& seconds() const { return seconds_; }

  // Notes a micro-batch's time on this rank. A bucket's first run here does not count: it warms
  // memory and caches.
  void measured(int bucket, double seconds);
  // After which steps the ranks exchange what they measured: often during warm-up, seldom later.
  bool due(std::int64_t step) const;
  // What this rank adds to the exchange (2 numbers a bucket); forgets it.
  std::vector<double> take();
  // The sums over all ranks.
  void agree(const std::vector<double>& sums);

  // For checkpoints. A restart places by the costs that the run began with, even if it recomputes
  // more or less for lack of memory, or a newer planner counts differently. It plans anew if a
  // bucket's micro-batches have another number of clips.
  std::string to_text() const;
  // Exit::checkpoint if the text cannot be read or has another number of buckets.
  void from_text(const std::string& text);
  // [bucket] Only the measured seconds of such a text, 0 where there are none. Exit::checkpoint as
  // from_text().
  static std::vector<double> seconds_in(const std::string& text, std::size_t buckets);

 private:
  // The contents of a text.
  struct Noted {
    std::vector<Planned> planned;
    std::vector<double> seconds, weight;
  };
  static Noted read(const std::string& text, std::size_t buckets);

  std::vector<Planned> planned_;
  std::vector<double> seconds_;  // [bucket], 0: not measured
  std::vector<double> weight_;   // [bucket], measurements that seconds_ stands for
  std::vector<double> sums_;  // [bucket][2] speeds (1/seconds) and their number, not exchanged yet
  std::vector<bool> met_;     // [bucket] measured here before
};

}  // namespace weft
