// The epochs of a mix: of several stores by weight, and of buckets of which data.keep takes a
// share. StepPlanner (data/step_plan.h) asks for them where buckets have parts.
//
// An epoch has a fixed number of micro-batches. They are divided among the buckets, and each
// bucket's samples among its parts, in proportion to Bucket::Part::samples: in every epoch a bucket
// or part has its share rounded down or up, and what rounding leaves over is carried to the next
// epoch, so that no share drifts however long a run is. A part is read in passes: each is a
// shuffled order of all its clips, and an epoch goes on where the last one ended. So no clip comes
// again before all others of its store and bucket have come, however high the weight.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <vector>

#include "data/step_plan.h"

namespace weft {

// Divides totals, one after the other, in proportion to weights that are not negative and not all
// 0. In whole numbers, so that every host has the same result.
class Apportionment {
 public:
  explicit Apportionment(std::span<const double> weights);
  // Each gets its share of `total` (below 2^31) rounded down or up; of those that may be rounded
  // up, the ones that have had too little so far are.
  std::vector<std::int64_t> deal(std::int64_t total);

 private:
  static constexpr int bits = 32;
  std::vector<std::int64_t> share_;   // of 2^bits
  std::vector<std::int64_t> credit_;  // what it has had too little, of 2^bits
};

class MixedEpochs {
 public:
  MixedEpochs(std::span<const Bucket> buckets, std::span<const std::int64_t> batch_sizes,
              std::uint64_t seed);

  std::int64_t micro_batches() const { return micro_batches_; }  // of each epoch; 0: no sample
  // A function of (seed, e). One caller at a time. Epochs far from those before take longer: what
  // is carried is counted up to them, a microsecond or so an epoch and bucket.
  std::vector<MicroBatch> epoch(std::int64_t e);

 private:
  // Before an epoch.
  struct State {
    std::vector<Apportionment> buckets;               // one
    std::vector<Apportionment> parts;                 // [bucket that is trained on]
    std::vector<std::vector<std::int64_t>> position;  // [.., part] samples since the first epoch
  };
  struct Counts {
    std::vector<std::vector<std::int64_t>> samples;  // [bucket that is trained on, part]
  };
  Counts advance(State& state) const;
  State before(std::int64_t e);

  std::span<const Bucket> buckets_;
  std::uint64_t seed_;
  std::vector<int> trained_;         // buckets with samples
  std::vector<std::int64_t> sizes_;  // of them, samples in a micro-batch
  std::int64_t micro_batches_ = 0;
  State first_;
  std::map<std::int64_t, State> known_;  // some epochs of late
};

}  // namespace weft
