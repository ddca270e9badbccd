// Keeps a network busy with frames: reader threads prepare them (decode, resize) and finish them
// (post-processing) while the calling thread runs the network. Measured times set the number of
// threads, the frames that the network takes at once, and how many are read ahead; they also say
// who waited for whom.
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

struct PrefetchLimits {
  int threads = 1;              // of this rank, for all stages
  bool network_on_gpu = false;  // else the network takes the threads that reading leaves
  std::int64_t most_batch = 64;
  std::size_t frame_bytes = 1;  // of a frame that is ready; at the start, where they differ
  std::size_t most_bytes = 1;   // of all that are read ahead
  // Frames that may be read ahead; of a short list each rank should leave the others their share.
  std::int64_t most_ahead = std::numeric_limits<std::int64_t>::max();
  std::function<bool(std::int64_t)> fits;  // whether the network's memory is enough for a batch
};

// A mean over all values at first, and over about the last twenty later.
class SmoothTime {
 public:
  void add(double seconds) {
    count_ = count_ < 20 ? count_ + 1 : 20;
    value_ += (seconds - value_) / count_;
  }
  void reset() { count_ = 0, value_ = 0; }
  bool known() const { return count_ > 0; }
  double value() const { return value_; }

 private:
  double count_ = 0, value_ = 0;
};

// Arithmetic alone, without threads and clocks.
class PrefetchTuner {
 public:
  explicit PrefetchTuner(PrefetchLimits limits);

  // Seconds of a frame, and its bytes, 0 where frame_bytes is right.
  void took_prepare(double decode, double resize, std::size_t bytes = 0);
  void took_finish(double seconds);
  // Seconds of a batch.
  void took_network(std::int64_t frames, double seconds);

  // Threads that prepare and finish frames: as many as keep the network busy. All that there are
  // until times are known; beside a GPU one is left to the thread that drives it.
  int readers() const;
  // Threads of the network: 1 that drives a GPU; else those that readers leave.
  int network_threads() const;
  // Frames that the network takes at once. Doubles while that makes a frame cheaper by 3 % and
  // fits.
  std::int64_t batch() const { return batch_; }
  // Frames, also those that nobody has begun, that may wait for the network.
  std::int64_t ahead() const;

 private:
  bool may_grow() const;
  double busy_readers() const;

  PrefetchLimits limits_;
  SmoothTime decode_, resize_, finish_, network_;  // of a frame
  std::int64_t batch_ = 1;
  bool settled_ = false;
  std::vector<double> trial_;          // seconds of a frame in batches of this size
  double best_ = 0;                    // the same of half of it
  static constexpr int trials = 4;     // the first of a size pays for its memory
  static constexpr double gain = .97;  // of the time of a frame
};

// One frame on its way. What it holds is the work's own.
struct PrefetchUnit {
  virtual ~PrefetchUnit() = default;
};

// The stages of a frame. Each call returns or notes what it took.
class PrefetchWork {
 public:
  virtual ~PrefetchWork() = default;
  struct Prepared {
    double decode = 0, resize = 0;  // seconds
    bool ready = true;              // false: there is no frame, and the work has dealt with it
    std::size_t bytes = 0;          // of the frame, where frames differ
  };
  // On several threads at once. An exception ends the prefetch.
  virtual Prepared prepare(PrefetchUnit& unit) = 0;
  virtual double finish(PrefetchUnit& unit) = 0;
  // On the thread that calls add() and drain(), which may use `threads` of them.
  virtual double network(std::span<PrefetchUnit* const> units, int threads) = 0;
};

// The times of one rank. Seconds of stages are sums over threads.
struct PrefetchTimes {
  std::int64_t frames = 0, batches = 0;
  double decode = 0, resize = 0, network = 0, finish = 0;
  double network_cores = 0;      // thread-seconds of it, where it runs on cores
  double elapsed = 0;            // of add() and drain(), and between them
  double network_waited = 0;     // for frames
  double frames_waited = 0;      // for the network: readers had nothing to do
  std::int64_t batch = 0;        // frames that the network took at once in the end
  int readers = 0, threads = 0;  // most readers at work; threads of the rank
};

class Prefetch {
 public:
  using Clock = std::function<double()>;
  Prefetch(PrefetchWork& work, PrefetchLimits limits, Clock clock = now_seconds);
  // Drops what is still on its way.
  ~Prefetch();
  Prefetch(const Prefetch&) = delete;
  Prefetch& operator=(const Prefetch&) = delete;

  // Takes a frame. While enough of them wait, runs the network.
  void add(std::unique_ptr<PrefetchUnit> unit);
  // Until all frames are finished.
  void drain();
  PrefetchTimes times() const;

 private:
  using Units = std::deque<std::unique_ptr<PrefetchUnit>>;
  void begin();
  void account();
  void serve(const std::stop_token& end);
  void handle(std::unique_lock<std::mutex>& lock);
  void run_network(std::unique_lock<std::mutex>& lock, std::size_t frames);
  void step(std::unique_lock<std::mutex>& lock, bool all);
  void check();
  bool has_task() const { return !finishing_.empty() || !waiting_.empty(); }
  // Frames that the network has not had.
  std::int64_t before_network() const;

  PrefetchWork& work_;
  const bool network_on_gpu_;
  const int threads_of_rank_;
  Clock clock_;

  mutable std::mutex mutex_;  // of all that follows
  std::condition_variable_any tasks_;
  std::condition_variable changed_;
  PrefetchTuner tuner_;
  Units waiting_, ready_, finishing_;
  int preparing_ = 0, running_ = 0, allowed_ = 0;
  double began_ = 0, accounted_ = 0;
  bool at_work_ = false;
  std::exception_ptr error_;
  PrefetchTimes times_;
  std::vector<std::jthread> readers_;
};

// How long all ranks' stages took, and who waited.
struct PrefetchSummary {
  int ranks = 0;
  bool on_gpu = false;  // the network
  double cores = 0;     // of all hosts, as far as ranks could use them
  PrefetchTimes sum;    // of all ranks; of elapsed, batch, readers and threads the largest

  // A rank's numbers, and its share of the cores.
  void add(const PrefetchTimes& rank, double rank_cores);
  // The same from its share of a report; nothing where that has none.
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

// A rank's numbers, and its cores, as members of its share of the report, and back; zeros where
// there are none.
nlohmann::ordered_json as_share(const PrefetchTimes& times, double cores);
PrefetchTimes from_share(const nlohmann::ordered_json& share);

}  // namespace weft
