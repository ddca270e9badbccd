#include "jobs/score/feed.h"

#include <algorithm>
#include <utility>

namespace weft {
namespace {

// A rank keeps its cores for so many seconds before others have a turn: passing them on takes some
// milliseconds.
constexpr double turn_seconds = 0.25;

}  // namespace

Feed::Feed(FeedWork& work, Cores& cores, FeedLimits limits, Clock clock)
    : work_(work),
      cores_(cores),
      overlap_(limits.overlap),
      clock_(std::move(clock)),
      tuner_(std::move(limits)) {}

Feed::~Feed() {
  for (std::jthread& t : threads_) t.request_stop();
  threads_.clear();
  if (held_ > 0) cores_.give(held_);
}

FeedTimes Feed::times() const {
  const std::lock_guard lock(mutex_);
  FeedTimes t = times_;
  t.batch = tuner_.batch();
  return t;
}

std::int64_t Feed::before_network() const {
  return std::ssize(waiting_) + preparing_ + std::ssize(ready_);
}

void Feed::check() {
  if (error_) std::rethrow_exception(error_);
}

// Before the number of threads at work changes.
void Feed::account() {
  const double now = clock_(), since = std::exchange(accounted_, now);
  if (overlap_ && at_work_)
    times_.frames_waited += (now - since) * std::max(0, allowed_ - running_);
}

void Feed::begin() {
  account();
  if (!std::exchange(at_work_, true)) {
    began_ = clock_();
    cores_.set_at_work(true);
  }
  budget_ = overlap_ ? cores_.budget() : cores_.turn();
  times_.budget = std::max(times_.budget, budget_);
  while (std::ssize(threads_) < budget_)
    threads_.emplace_back([this](const std::stop_token& end) { serve(end); });
}

void Feed::add(std::unique_ptr<FeedUnit> unit) {
  std::unique_lock lock(mutex_);
  check();
  begin();
  waiting_.push_back(std::move(unit));
  if (overlap_) {
    allowed_ = tuner_.workers(budget_);
    tasks_.notify_one();
  }
  while (before_network() >= tuner_.ahead(budget_)) step(lock, false);
}

void Feed::drain() {
  std::unique_lock lock(mutex_);
  check();
  if (!at_work_) {
    cores_.set_at_work(false);  // there was nothing to do
    return;
  }
  while (before_network() > 0) step(lock, true);
  if (overlap_) {
    changed_.wait(lock, [&] { return error_ || (finishing_.empty() && running_ == 0); });
    check();
  } else {
    if (!finishing_.empty()) let_work(lock, held_);
    cores_.give(std::exchange(held_, 0));
  }
  account();
  at_work_ = false;
  cores_.set_at_work(false);
  times_.elapsed += clock_() - began_;
}

void Feed::step(std::unique_lock<std::mutex>& lock, bool all) {
  if (overlap_)
    step_beside(lock, all);
  else
    step_in_turns(lock, all);
}

// The network runs once while threads prepare other frames.
void Feed::step_beside(std::unique_lock<std::mutex>& lock, bool all) {
  const double begin = clock_();
  const std::int64_t batch = tuner_.batch();
  // Maps wait for post-processing no longer than frames wait for the network.
  const std::int64_t most_finishing = 2 * tuner_.ahead(budget_);
  bool run = false, room = false;
  changed_.wait(lock, [&] {
    const bool last = all && waiting_.empty() && preparing_ == 0 && !ready_.empty();
    run = (std::ssize(ready_) >= batch || last) && std::ssize(finishing_) < most_finishing;
    // Frames that could not be read leave room for others.
    room = before_network() < (all ? 1 : tuner_.ahead(budget_));
    return error_ || run || room;
  });
  times_.network_waited += clock_() - begin;
  check();
  if (!run) return;
  run_network(lock, static_cast<std::size_t>(std::min(batch, std::ssize(ready_))), 1);
  account();
  budget_ = cores_.budget();
  allowed_ = tuner_.workers(budget_);
  tasks_.notify_all();
}

// All waiting frames are prepared by as many threads as there are cores for this rank; then the
// network has these cores.
void Feed::step_in_turns(std::unique_lock<std::mutex>& lock, bool all) {
  if (held_ > 0 && clock_() - held_since_ > turn_seconds) cores_.give(std::exchange(held_, 0));
  if (held_ == 0) {
    const double begin = clock_();
    const int wanted = budget_ = cores_.turn();
    lock.unlock();
    const int held = cores_.take(wanted, wanted);
    lock.lock();
    held_ = held;
    held_since_ = clock_();
    times_.core_waited += held_since_ - begin;
  }
  let_work(lock, held_);
  while (std::ssize(ready_) >= tuner_.batch() || (all && !ready_.empty())) {
    const auto frames = static_cast<std::size_t>(std::min(tuner_.batch(), std::ssize(ready_)));
    run_network(lock, frames, held_);
  }
}

// Until the threads have nothing left to do.
void Feed::let_work(std::unique_lock<std::mutex>& lock, int threads) {
  const double begin = clock_();
  allowed_ = threads;
  tasks_.notify_all();
  changed_.wait(lock, [&] { return running_ == 0 && (error_ || !has_task()); });
  allowed_ = 0;
  times_.network_waited += clock_() - begin;
  check();
}

void Feed::run_network(std::unique_lock<std::mutex>& lock, std::size_t frames, int threads) {
  Units batch;
  std::vector<FeedUnit*> units;
  for (std::size_t i = 0; i < frames; ++i) {
    units.push_back(ready_.front().get());
    batch.push_back(std::move(ready_.front()));
    ready_.pop_front();
  }
  lock.unlock();
  const double seconds = work_.network(units, threads);
  lock.lock();
  tuner_.took_network(static_cast<std::int64_t>(frames), seconds);
  times_.network += seconds;
  if (!overlap_) {
    times_.frames_waited += seconds;
    times_.network_cores += seconds * threads;
  }
  times_.frames += static_cast<std::int64_t>(frames);
  ++times_.batches;
  for (auto& unit : batch) finishing_.push_back(std::move(unit));
}

void Feed::serve(const std::stop_token& end) {
  std::unique_lock lock(mutex_);
  while (!end.stop_requested()) {
    const auto may_work = [&] { return !error_ && running_ < allowed_ && has_task(); };
    if (!tasks_.wait(lock, end, may_work)) return;
    handle(lock);
    changed_.notify_all();
    // Another thread may have been kept back by this one.
    if (has_task()) tasks_.notify_one();
  }
}

// One task, finishing before preparing: it makes memory free.
void Feed::handle(std::unique_lock<std::mutex>& lock) {
  const bool finishing = !finishing_.empty();
  Units& from = finishing ? finishing_ : waiting_;
  std::unique_ptr<FeedUnit> unit = std::move(from.front());
  from.pop_front();
  account();
  times_.workers = std::max(times_.workers, ++running_);
  if (!finishing) ++preparing_;
  FeedWork::Prepared prepared{0, 0, false};
  double finish = 0, waited = 0;
  std::exception_ptr error;
  lock.unlock();
  if (overlap_) {
    const double begin = clock_();
    cores_.take(1);
    waited = clock_() - begin;
  }
  try {
    if (finishing)
      finish = work_.finish(*unit);
    else
      prepared = work_.prepare(*unit);
  } catch (...) {
    error = std::current_exception();
  }
  if (overlap_) cores_.give(1);
  if (finishing || !prepared.ready) unit.reset();
  lock.lock();
  account();
  --running_;
  times_.core_waited += waited;
  if (!finishing) --preparing_;
  if (error) {
    if (!error_) error_ = error;
    return;
  }
  if (finishing) {
    times_.finish += finish;
    tuner_.took_finish(finish);
    return;
  }
  times_.decode += prepared.decode;
  times_.resize += prepared.resize;
  if (!prepared.ready) return;
  tuner_.took_prepare(prepared.decode, prepared.resize);
  ready_.push_back(std::move(unit));
}

}  // namespace weft
