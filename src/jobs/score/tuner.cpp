#include "jobs/score/tuner.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace weft {

FeedTuner::FeedTuner(FeedLimits limits) : limits_(std::move(limits)) {}

void FeedTuner::took_prepare(double decode, double resize) {
  decode_.add(decode);
  resize_.add(resize);
}

void FeedTuner::took_finish(double seconds) { finish_.add(seconds); }

bool FeedTuner::may_grow() const {
  const std::int64_t next = 2 * batch_;
  const auto bytes = static_cast<std::size_t>(2 * next) * limits_.frame_bytes;
  return next <= limits_.most_batch && bytes <= limits_.most_bytes &&
         (!limits_.fits || limits_.fits(next));
}

void FeedTuner::took_network(std::int64_t frames, double seconds) {
  const double a_frame = seconds / static_cast<double>(frames);
  network_.add(a_frame);
  if (settled_ || frames != batch_) return;
  trial_.push_back(a_frame);
  if (std::ssize(trial_) < trials) return;
  std::sort(trial_.begin() + 1, trial_.end());
  const double median = trial_[1 + (trials - 1) / 2];
  if (batch_ > 1 && median >= gain * best_) {
    batch_ /= 2;
    settled_ = true;
  } else if (may_grow()) {
    best_ = median;
    batch_ *= 2;
  } else {
    settled_ = true;
  }
  trial_.clear();
  network_.reset();
}

int FeedTuner::workers(int budget) const {
  if (limits_.own_thread) budget = std::max(1, budget - 1);
  if (!limits_.overlap || !network_.known() || !decode_.known()) return budget;
  // A fifth more than the means say: times vary, and a network that waits is the dearer one.
  const double host = decode_.value() + resize_.value() + finish_.value();
  const double wanted = network_.value() > 0 ? 1.2 * host / network_.value() : budget;
  return static_cast<int>(std::clamp(std::ceil(wanted), 1.0, static_cast<double>(budget)));
}

std::int64_t FeedTuner::ahead(int budget) const {
  // Beside the network: the next batch, the one that is being prepared, and what the threads have
  // in hand. In turns with it: a few frames a thread, so that none idles at the end of a turn for
  // long; a single thread gains nothing by more than a batch.
  const std::int64_t wanted = limits_.overlap ? 2 * batch_ + 2 * workers(budget)
                              : budget == 1   ? batch_
                                              : std::max<std::int64_t>(batch_, 2 * budget);
  const auto most =
      static_cast<std::int64_t>(limits_.most_bytes / std::max<std::size_t>(1, limits_.frame_bytes));
  return std::max(std::min(wanted, most), batch_);
}

}  // namespace weft
