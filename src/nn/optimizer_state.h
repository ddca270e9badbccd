// The arrays that AdamW or SGD and EMA keep for the trainable parameters: whole on every rank, or
// only for the rank's own parts.
#pragma once

#include <vector>

#include "core/parts.h"
#include "nn/parameters.h"

namespace weft {

// The state of the elements that this rank updates: of every gradient bucket a part, one after the
// other. Sharded (parallel.zero = 1): part `rank` of `ranks` of each bucket. Whole: each bucket, on
// every rank.
class OptimizerState {
 public:
  // Zero moments; the EMA starts as a copy of the weights. A sharded bf16 model's f32 values of
  // bf16_only buckets move here, and leave the table.
  // `squares`: AdamW's second moments are kept; SGD has its momentum in exp_avg alone.
  OptimizerState(ParameterTable& table, bool sharded, int rank, int ranks, bool squares = true);

  // What this rank owns of a bucket: elements of the flat space.
  const Part& part(int bucket) const { return parts_[static_cast<std::size_t>(bucket)]; }
  bool sharded() const { return sharded_; }

  // The owned part of a bucket in each array, f32.
  Tensor master(int bucket) const;
  Tensor exp_avg(int bucket) const { return own(exp_avg_, bucket); }
  bool has_squares() const { return exp_avg_sq_.defined(); }
  Tensor exp_avg_sq(int bucket) const { return own(exp_avg_sq_, bucket); }
  Tensor ema(int bucket) const { return own(ema_, bucket); }
  // The same of the gradients and of the bf16 weights (undefined in an f32 model).
  Tensor gradient(int bucket) const;
  Tensor working(int bucket) const;

  // Bytes on this rank, for the start table: masters that live here, moments, EMA.
  std::size_t bytes() const;

 private:
  Tensor own(const Tensor& array, int bucket) const;

  ParameterTable& table_;
  bool sharded_;
  std::vector<Part> parts_;
  std::vector<std::int64_t> offsets_;  // of the parts in the arrays below; one more than parts
  Tensor master_;  // bf16_only buckets, which come first; undefined if the table has the values
  Tensor exp_avg_, exp_avg_sq_, ema_;
};

}  // namespace weft
