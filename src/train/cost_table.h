// What a micro-batch of each bucket costs. Placements follow the planner's costs (data/step_plan.h,
// longest first): these are the same in every run, so that runs on as many ranks repeat their bits.
// What micro-batches really take is measured beside them, for finding slow ranks
// (train/metrics/watches.h) and for `weft simulate --costs`.
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
  double cost(int bucket) const { return planned_[static_cast<std::size_t>(bucket)].cost; }
  // The seconds it takes, as far as the ranks have told each other; before that, the planner's
  // cost. A bucket that nobody has measured is expected to take its cost times what the measured
  // ones took of theirs.
  double expected(int bucket) const;
  // [bucket] Seconds measured on all ranks, 0 where none was.
  const std::vector<double>& seconds() const { return seconds_; }

  // Notes a micro-batch's time on this rank. A bucket's first time here does not count: it touches
  // memory and caches first.
  void measured(int bucket, double seconds);
  // After which steps the ranks exchange what they measured: often during warm-up, seldom later.
  bool due(std::int64_t step) const;
  // What this rank adds to the exchange (2 numbers a bucket); forgets it.
  std::vector<double> take();
  // The sums over all ranks.
  void agree(const std::vector<double>& sums);

  // For checkpoints. A restart places by the costs that the run began with, though its memory may
  // make it recompute more or less, or a newer planner may count otherwise; it plans anew where a
  // bucket's micro-batches have another number of clips.
  std::string to_text() const;
  // Also the text of format 1, of which the measured seconds alone count. Exit::checkpoint if it
  // cannot be read or is of another number of buckets.
  void from_text(const std::string& text);
  // [bucket] The measured seconds in such a text alone, 0 where there are none. Exit::checkpoint as
  // from_text().
  static std::vector<double> seconds_in(const std::string& text, std::size_t buckets);

 private:
  // What a text tells. `planned` is empty in format 1.
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
