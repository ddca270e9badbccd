// Where the ranks of `weft generate` get their batches of clips: groups of ranks, the shared queue, and what lost ranks
// leave behind.
#pragma once

#include <mpi.h>

#include <atomic>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "config/deck.h"
#include "jobs/rank_roll.h"
#include "jobs/work_queue.h"
#include "train/stop.h"

namespace weft {

// Ranks that make clips together, and the first ranks of all groups.
struct ClipGroups {
  int rank = 0, count = 1, index = 0, size = 1;
  MPI_Comm group = MPI_COMM_NULL, firsts = MPI_COMM_NULL;
  bool first = true;

  ClipGroups(MPI_Comm world, int sp);
  // Collective, unless on the way of an exception.
  ~ClipGroups();
  ClipGroups(const ClipGroups&) = delete;
  ClipGroups& operator=(const ClipGroups&) = delete;

  // The other ranks of this one's group.
  std::vector<int> mates() const;
  // The first rank's numbers on all of its group.
  void share(std::vector<std::int64_t>& numbers) const;
};

// Which batch this group makes next. A request to stop, whichever rank it comes to, closes the queue for all of them: by a
// signal, the file OUTPUT/stop or the end of the Slurm job coming near.
class ClipQueue {
 public:
  // `settled`: whether a rank that is lost has finished or failed all clips of that place of the order, whose length is
  // `items`.
  ClipQueue(const Deck& deck, const std::filesystem::path& output, const ClipGroups& groups,
            RankRoll& roll, std::int64_t items,
            std::function<bool(int rank, std::int64_t place)> settled);

  // A place in the order from the queue, or -1: there are no more. Alike on all ranks of the group.
  std::int64_t next();
  // After that, with nothing in hand: a place that a lost rank has left unmade, or -1 when all other groups have nothing in
  // hand either. Waits for them.
  std::int64_t leftover();
  // Whether leftover()'s last place was in the hands of a rank that is lost, and not only left.
  bool from_lost() const { return from_lost_; }
  // What a batch has taken: the job must last as long for another one.
  void took(double seconds) { longest_ = std::max(longest_.load(), seconds); }
  bool asked_to_stop() const { return asked_; }

 private:
  void watch(const std::stop_token& end);
  std::int64_t share(std::int64_t place) const;
  bool take(std::int64_t place, int losses);
  std::int64_t take_over(const std::vector<RollEntry>& states, const std::vector<bool>& lost);

  const ClipGroups& groups_;
  RankRoll& roll_;
  std::int64_t items_;
  std::function<bool(int, std::int64_t)> settled_;
  WorkQueue queue_;
  bool shared_, from_lost_ = false;
  std::int64_t at_ = 0, end_ = 0;
  Requests requests_;
  std::atomic<double> longest_ = 0;
  std::atomic<bool> asked_ = false;
  std::jthread watch_;  // ends before the queue does
};

}  // namespace weft
