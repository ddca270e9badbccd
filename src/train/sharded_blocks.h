// Sharded weights (ZeRO stage 3, as FSDP: Zhao et al., arXiv 2304.11277): a rank holds a part of
// every block of the model, and of whole blocks two at a time, those that are computed now and
// next. The table (nn/parameters.h) knows where they lie and says when one is entered; this is what
// is sent then.
//
// Order of the collectives, the same on every rank, with buckets S-1 (the first block) ... 0:
//   forward   when b is entered: gather b-1
//   backward  when b is entered: gather b+1 (0 and 1 are still there); when it is left: sum of b
// Every rank goes through as many micro-batches in a step as the one with the most; without clips
// it walks along and adds zeros.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "nn/parameters.h"
#include "parallel/communicator.h"

namespace weft {

class ShardedBlocks {
 public:
  // Both outlive it. `wire`: of the gradients. Without `overlap` each collective is waited for at
  // once.
  ShardedBlocks(Communicator& comm, ParameterTable& table, CommDtype wire, bool overlap);

  // Bucket `from` is left (-1: none, a micro-batch begins) and `to` is entered: waits for its
  // weights, and issues the gather of what follows. In a backward it also takes in the sum of the
  // gradient whose slot `to` needs.
  void enter(int from, int to);
  // The gradient of a bucket is complete here: issues its sum over ranks, which goes to the shards:
  // the first of a step in place of what is there, others on top of it.
  void begin_step();
  void reduce(int bucket);
  void collect();  // waits for all sums
  // The shards have new weights: what is gathered is old.
  void changed();
  // Gathers a bucket ahead of its use, if its slot is free.
  void fetch(int bucket);
  // Waits for what is gathered, also where nothing will use it.
  void settle();

  // Between the two, each rank may run the model as often as it likes (`backward`: with a backward
  // each time, whose gradients are not sent): a pass begins with a sum of how many ranks take part,
  // and one that is done walks along with the others until they are. Collective.
  void begin_passes(bool backward);
  void end_passes();

  // Seconds that the host was blocked, since the last call.
  double take_blocked();

 private:
  bool holds(int bucket) const { return held_[bucket % 2] == bucket; }
  void collect(int bucket);
  double ranks_in_pass(bool self);

  Communicator& comm_;
  ParameterTable& table_;
  CommDtype wire_;
  bool overlap_;
  enum class Passes { none, forward, both } passes_ = Passes::none;
  std::array<int, 2> held_ = {-1, -1};  // [slot] the bucket whose weights are there or on their way
  std::array<Communicator::Ticket, 2> gathers_ = {0, 0};  // [slot]
  struct Sum {
    Communicator::Ticket ticket = 0;
    bool sent = false;   // and not yet taken in
    bool begun = false;  // the shard has a sum of this step
  };
  std::vector<Sum> sums_;  // [bucket]
  Tensor present_;         // f64 [1]
  double blocked_ = 0;
};

}  // namespace weft
