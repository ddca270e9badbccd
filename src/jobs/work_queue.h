// One queue of items that all ranks take from, by an MPI one-sided counter at rank 0: whoever is free takes the next one.
#pragma once

#include <mpi.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>

namespace weft {

class WorkQueue {
 public:
  // Collective over `takers`, the ranks that take items (the first of each group, where groups share an item); a rank that
  // only follows its group passes MPI_COMM_NULL and never calls next(). Items are 0 ... items - 1, in that order.
  // `owner_lost`: whether the first taker, who has the counter, is gone. Given by those who go on where the queue does not
  // work; without it Exit::usage where MPI has no one-sided memory between the takers' hosts, as Open MPI 4.1 over TCP.
  WorkQueue(MPI_Comm takers, std::int64_t items, std::function<bool()> owner_lost = {});
  // Collective over the takers: waits for the last of them, except on the way of an exception.
  ~WorkQueue();
  WorkQueue(const WorkQueue&) = delete;
  WorkQueue& operator=(const WorkQueue&) = delete;

  // Whether it gives out items: not without one-sided memory, nor after its owner was found lost.
  bool works() const { return works_; }
  // The next item that nobody has taken, or -1 behind the last, or where it does not work.
  std::int64_t next();
  // Nobody gets an item any more, this rank or another, whatever is left. Any taker, any thread, more than once.
  void close();

 private:
  // Adds to the counter: its value before.
  std::int64_t add(std::int64_t count);

  std::int64_t items_;
  std::function<bool()> owner_lost_;
  std::atomic<bool> works_ = true;
  std::mutex mutex_;  // of this rank's use of the window
  MPI_Comm comm_ = MPI_COMM_NULL;
  MPI_Win window_ = MPI_WIN_NULL;
  std::int64_t* counter_ = nullptr;
  std::int64_t added_ = 0, before_ = 0;  // of the request under way
  std::jthread progress_;  // at the counter's owner, where takers are on several hosts
};

}  // namespace weft
