// One queue of items that all ranks take from, by an MPI one-sided counter at rank 0: whoever is free takes the next one.
#pragma once

#include <mpi.h>

#include <cstdint>
#include <mutex>
#include <thread>

namespace weft {

class WorkQueue {
 public:
  // Collective over `takers`, the ranks that take items (the first of each group, where groups share an item); a rank that
  // only follows its group passes MPI_COMM_NULL and never calls next(). Items are 0 ... items - 1, in that order.
  WorkQueue(MPI_Comm takers, std::int64_t items);
  // Collective over the takers: waits for the last of them, except on the way of an exception.
  ~WorkQueue();
  WorkQueue(const WorkQueue&) = delete;
  WorkQueue& operator=(const WorkQueue&) = delete;

  // The next item that nobody has taken, or -1 behind the last.
  std::int64_t next();
  // Nobody gets an item any more, this rank or another, whatever is left. Any taker, any thread, more than once.
  void close();

 private:
  // Adds to the counter: its value before.
  std::int64_t add(std::int64_t count);

  std::int64_t items_;
  std::mutex mutex_;  // of this rank's use of the window
  MPI_Comm comm_ = MPI_COMM_NULL;
  MPI_Win window_ = MPI_WIN_NULL;
  std::int64_t* counter_ = nullptr;
  std::jthread progress_;  // at the counter's owner, where takers are on several hosts
};

}  // namespace weft
