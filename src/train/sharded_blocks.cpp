#include "train/sharded_blocks.h"

#include <utility>

#include "core/error.h"
#include "ops/pointwise.h"

namespace weft {

ShardedBlocks::ShardedBlocks(Communicator& comm, ParameterTable& table, CommDtype wire,
                             bool overlap)
    : comm_(comm),
      table_(table),
      wire_(wire),
      overlap_(overlap),
      sums_(static_cast<std::size_t>(table.sharded_buckets())),
      present_(Tensor::persistent({1}, DType::f64)) {}

void ShardedBlocks::changed() { held_ = {-1, -1}; }

void ShardedBlocks::fetch(int bucket) {
  if (bucket < 0 || bucket >= std::ssize(sums_) || holds(bucket)) return;
  const ParameterTable::Bucket& b = table_.buckets()[bucket];
  Tensor whole = table_.working().defined() ? table_.working_of(bucket) : table_.values_of(bucket);
  const Part own = table_.owned(bucket);
  Tensor mine = whole.slice(own.begin - b.begin, own.end - b.begin);
  ops::convert(table_.shard(bucket), mine);
  const auto slot = static_cast<std::size_t>(bucket % 2);
  gathers_[slot] = comm_.all_gather(whole);
  held_[slot] = bucket;
  if (!overlap_) blocked_ += comm_.wait(gathers_[slot]);
}

void ShardedBlocks::settle() {
  for (const auto ticket : gathers_) comm_.wait(ticket);
}

void ShardedBlocks::enter(int from, int to) {
  const int last = static_cast<int>(sums_.size()) - 1;
  const bool begins = from < 0 || (passes_ == Passes::forward && to == last);
  // A model whose blocks are used in another order must not name them (TrainingTask::blocks_named).
  WEFT_ASSERT(begins ? to == last : to == from - 1 || to == from + 1);
  if (begins && passes_ != Passes::none) ranks_in_pass(true);
  const bool backward = !begins && to == from + 1;

  fetch(to);
  blocked_ += comm_.wait(gathers_[static_cast<std::size_t>(to % 2)]);
  // The gradient's slot: in a backward the bucket before the last has had it, and bucket 0 begins
  // the backward without being entered again.
  if (backward && to >= 2) collect(to - 2);
  if (!backward && to == 0) collect();
  fetch(backward ? to + 1 : to - 1);
}

void ShardedBlocks::begin_step() {
  for (Sum& s : sums_) s.begun = false;
}

void ShardedBlocks::reduce(int bucket) {
  Sum& s = sums_[static_cast<std::size_t>(bucket)];
  s.ticket = comm_.reduce_scatter_sum(table_.gradient_of(bucket), wire_);
  s.sent = true;
  if (!overlap_) blocked_ += comm_.wait(s.ticket);
}

void ShardedBlocks::collect(int bucket) {
  Sum& s = sums_[static_cast<std::size_t>(bucket)];
  if (!std::exchange(s.sent, false)) return;
  blocked_ += comm_.wait(s.ticket);
  const ParameterTable::Bucket& b = table_.buckets()[bucket];
  const Part own = table_.owned(bucket);
  const Tensor sum = table_.gradient_of(bucket).slice(own.begin - b.begin, own.end - b.begin);
  Tensor to = table_.shard_gradient(bucket);
  if (std::exchange(s.begun, true))
    ops::add_inplace(sum, to);
  else
    ops::convert(sum, to);
}

void ShardedBlocks::collect() {
  for (int b = 0; b < std::ssize(sums_); ++b) collect(b);
}

double ShardedBlocks::ranks_in_pass(bool self) {
  const double one = self ? 1 : 0;
  present_.set(std::span<const double>(&one, 1));
  blocked_ += comm_.wait(comm_.all_reduce_sum(present_));
  // One that takes part need not know of the others, so that a GPU's host does not wait.
  return self ? 1 : present_.to_host().data<double>()[0];
}

void ShardedBlocks::begin_passes(bool backward) {
  if (sums_.empty()) return;
  collect();
  table_.begin_micro_batch();
  passes_ = backward ? Passes::both : Passes::forward;
}

void ShardedBlocks::end_passes() {
  const Passes kind = std::exchange(passes_, Passes::none);
  if (kind == Passes::none) return;
  while (ranks_in_pass(false) > 0) {
    comm_.check();
    table_.walk(kind == Passes::both, false);
  }
  table_.begin_micro_batch();
}

double ShardedBlocks::take_blocked() { return std::exchange(blocked_, 0.0); }

}  // namespace weft
