// How many threads prepare frames, how many frames the network takes at once, and how many are read
// ahead: from the measured times of a frame's stages. Arithmetic alone, without threads and clocks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

namespace weft {

struct FeedLimits {
  // Whether the network runs elsewhere, on a GPU: threads prepare frames meanwhile. Otherwise it
  // takes the same cores, by turns with them.
  bool overlap = false;
  // Whether the thread that drives such a network takes a core, as one that waits for a GPU does.
  bool own_thread = false;
  std::int64_t most_batch = 64;
  std::size_t frame_bytes = 1;             // of a frame that is ready
  std::size_t most_bytes = 1;              // of all that are read ahead
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

class FeedTuner {
 public:
  explicit FeedTuner(FeedLimits limits);

  // Seconds of a frame.
  void took_prepare(double decode, double resize);
  void took_finish(double seconds);
  // Seconds of a batch.
  void took_network(std::int64_t frames, double seconds);

  // Of `budget` threads: as many as keep the network busy. All of them until that is known, and
  // where they take turns with the network.
  int workers(int budget) const;
  // Frames that the network takes at once. Doubles while that makes a frame cheaper by 3 % and
  // fits.
  std::int64_t batch() const { return batch_; }
  // Frames, also those that nobody has begun, that may wait for the network.
  std::int64_t ahead(int budget) const;

 private:
  bool may_grow() const;

  FeedLimits limits_;
  SmoothTime decode_, resize_, finish_, network_;  // of a frame
  std::int64_t batch_ = 1;
  bool settled_ = false;
  std::vector<double> trial_;          // seconds of a frame in batches of this size
  double best_ = 0;                    // the same of half of it
  static constexpr int trials = 4;     // the first of a size pays for its memory
  static constexpr double gain = .97;  // of the time of a frame
};

}  // namespace weft
