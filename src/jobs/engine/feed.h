// Keeps a network fed with frames: reader threads prepare them (decode, resize) and finish them
// (post-processing) while the calling thread runs the network. It tunes itself by one rule, that
// the network should not wait: it takes what is ready, so that it gets larger batches where it is
// the slower part, and where it shares the cores with readers, measured times say how many of them
// it leaves to these. The times also say who waited for whom.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <limits>
#include <memory>
#include <mutex>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "core/clock.h"

namespace weft {

struct FeedLimits {
  int threads = 1;              // of this rank, for all stages
  bool network_on_gpu = false;  // else the network takes the threads that reading leaves
  std::int64_t most_batch = 1;  // frames that the network takes at once
  std::size_t most_bytes = 1;   // of all that are read ahead
  // Frames that may be read ahead; of a short list each rank should leave the others their share.
  // Twice as many may wait for post-processing or be in it.
  std::int64_t most_ahead = std::numeric_limits<std::int64_t>::max();
};

// The times of one rank, by the names in its share of the report. Seconds of stages are sums over
// threads.
struct FeedTimes {
  std::int64_t frames = 0, network_batches = 0;
  double decode = 0, resize = 0, network = 0, post_processing = 0;
  double network_core_seconds = 0;  // of its threads, where it runs on cores
  double elapsed = 0;               // of add() and drain(), and between them
  double network_waited = 0;        // for frames
  double frames_waited = 0;         // for the network: readers had nothing to do, or no core
  std::int64_t batch = 0;           // most frames that the network took at once
  int threads = 0, budget = 0;      // most readers at work; threads of the rank
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE_WITH_DEFAULT(FeedTimes, frames, network_batches, elapsed, batch,
                                                threads, budget, decode, resize, network,
                                                post_processing, network_waited, frames_waited,
                                                network_core_seconds)

// How much of what: arithmetic alone, of what was measured so far.
struct FeedRules {
  FeedLimits limits;
  FeedTimes times;
  std::size_t frame_bytes = 0;  // of the largest so far; 0: none is known

  // Threads that prepare and finish frames. Beside a GPU all but the one that drives it; else as
  // many as keep the network busy, for it gets the others.
  int readers() const;
  int network_threads() const;
  // How many of the frames that are ready the network takes: a power of two, so that few sizes
  // occur.
  std::int64_t batch(std::int64_t ready) const;
  // Frames, also those that nobody has begun, that may wait for the network.
  std::int64_t ahead() const;

 private:
  double busy_readers() const;
};

// One frame on its way. What it holds is the work's own.
struct FeedUnit {
  virtual ~FeedUnit() = default;
};

// The stages of a frame. Each call returns or notes what it took.
class FeedWork {
 public:
  virtual ~FeedWork() = default;
  struct Prepared {
    double decode = 0, resize = 0;  // seconds
    bool ready = true;              // false: there is no frame, and the work has dealt with it
    std::size_t bytes = 0;          // of the frame that is ready
  };
  // On several threads at once. An exception ends the prefetch.
  virtual Prepared prepare(FeedUnit& unit) = 0;
  virtual double finish(FeedUnit& unit) = 0;
  // On the thread that calls add() and drain(), which may use `threads` of them.
  virtual double network(std::span<FeedUnit* const> units, int threads) = 0;
};

class Feed {
 public:
  using Clock = std::function<double()>;
  Feed(FeedWork& work, FeedLimits limits, Clock clock = now_seconds);
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
  void serve(const std::stop_token& end);
  void handle(std::unique_lock<std::mutex>& lock);
  void run_network(std::unique_lock<std::mutex>& lock, std::int64_t frames);
  void step(std::unique_lock<std::mutex>& lock, bool all);
  void check();
  bool has_task() const { return !finishing_.empty() || !waiting_.empty(); }
  // Frames that the network has not had.
  std::int64_t before_network() const;

  FeedWork& work_;
  Clock clock_;

  mutable std::mutex mutex_;  // of all that follows
  std::condition_variable_any tasks_;
  std::condition_variable changed_;
  FeedRules rules_;
  Units waiting_, ready_, finishing_;
  int preparing_ = 0, running_ = 0, allowed_ = 0;
  double began_ = 0;
  bool at_work_ = false;
  std::exception_ptr error_;
  std::vector<std::jthread> readers_;
};

// How long all ranks' stages took, and who waited.
struct FeedSummary {
  int ranks = 0;
  bool on_gpu = false;  // the network
  double cores = 0;     // of all hosts, as far as ranks could use them
  FeedTimes sum;        // of all ranks; of elapsed, batch and threads the largest

  void add(const FeedTimes& rank);
  // The same from a rank's share of a report; nothing where that has none.
  void add(const nlohmann::ordered_json& share);
  bool empty() const { return sum.frames == 0; }
  double rate() const;  // frames a second, measured
  // Frames a second that could be reached if only decode, resize and post-processing took time, and
  // if only the network did.
  double host_rate() const;
  double network_rate() const;
  double network_busy() const;  // the share of the ranks' time that the network was at work
  // The stage that bounds the job: "decode", "resize", "post-processing" or "network".
  std::string bound() const;
  // That, the rate, and what the others could do.
  std::string verdict() const;
  // Which waited for which, how long.
  std::string waits() const;
  nlohmann::ordered_json json() const;
};

}  // namespace weft
