// Feeds a network with frames: threads prepare them (decode, resize) and finish them
// (post-processing), and the calling thread runs the network. Where the network is on a GPU, both
// go on at once. On the CPU they take turns: threads prepare some frames, then the network takes
// all cores of the rank, so that never more threads run than there are cores.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <thread>
#include <vector>

#include "core/clock.h"
#include "jobs/score/cores.h"
#include "jobs/score/tuner.h"

namespace weft {

// One frame on its way. What it holds is the work's own.
struct FeedUnit {
  virtual ~FeedUnit() = default;
};

// The stages of a frame. Each call returns or notes what it took: the feed has no clock for them.
class FeedWork {
 public:
  virtual ~FeedWork() = default;
  struct Prepared {
    double decode = 0, resize = 0;  // seconds
    bool ready = true;              // false: there is no frame, and the work has dealt with it
  };
  // On several threads at once. An exception ends the feed.
  virtual Prepared prepare(FeedUnit& unit) = 0;
  virtual double finish(FeedUnit& unit) = 0;
  // On the thread of the feed's owner, which may use `threads` of them.
  virtual double network(std::span<FeedUnit* const> units, int threads) = 0;
};

// Of one rank. Seconds of stages are sums over threads.
struct FeedTimes {
  std::int64_t frames = 0, batches = 0;
  double decode = 0, resize = 0, network = 0, finish = 0;
  double network_cores = 0;     // core-seconds of it, where it runs on cores
  double elapsed = 0;           // of add() and drain(), and between them
  double network_waited = 0;    // for frames
  double frames_waited = 0;     // for the network: threads had nothing to do
  double core_waited = 0;       // for a core that another rank had
  std::int64_t batch = 0;       // frames that the network took at once in the end
  int workers = 0, budget = 0;  // most threads at work, most that were allowed
};

class Feed {
 public:
  using Clock = std::function<double()>;
  Feed(FeedWork& work, Cores& cores, FeedLimits limits, Clock clock = now_seconds);
  // Drops what is still on its way.
  ~Feed();
  Feed(const Feed&) = delete;
  Feed& operator=(const Feed&) = delete;

  // Takes a frame. While enough of them wait, runs the network.
  void add(std::unique_ptr<FeedUnit> unit);
  // Until all frames are finished.
  void drain();
  FeedTimes times() const;

 private:
  using Units = std::deque<std::unique_ptr<FeedUnit>>;
  void begin();
  void account();
  void serve(const std::stop_token& end);
  void handle(std::unique_lock<std::mutex>& lock);
  void run_network(std::unique_lock<std::mutex>& lock, std::size_t frames, int threads);
  void step(std::unique_lock<std::mutex>& lock, bool all);
  void step_beside(std::unique_lock<std::mutex>& lock, bool all);
  void step_in_turns(std::unique_lock<std::mutex>& lock, bool all);
  void let_work(std::unique_lock<std::mutex>& lock, int threads);
  void check();
  bool has_task() const { return !finishing_.empty() || !waiting_.empty(); }
  // Frames that the network has not had.
  std::int64_t before_network() const;

  FeedWork& work_;
  Cores& cores_;
  const bool overlap_;
  Clock clock_;

  mutable std::mutex mutex_;  // of all that follows
  std::condition_variable_any tasks_;
  std::condition_variable changed_;
  FeedTuner tuner_;
  Units waiting_, ready_, finishing_;
  int preparing_ = 0, running_ = 0, allowed_ = 0, budget_ = 1;
  int held_ = 0;  // cores of the calling thread, in turns
  double held_since_ = 0, began_ = 0, accounted_ = 0;
  bool at_work_ = false;
  std::exception_ptr error_;
  FeedTimes times_;
  std::vector<std::jthread> threads_;
};

}  // namespace weft
