#include "jobs/engine/feed.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <utility>

#include "core/log.h"

namespace weft {

// ---- How much of what ----

// How many readers are busy all the time while the network runs; negative: not known yet. A fifth
// more than the times say: they vary, and an idle network costs more than an idle reader.
double FeedRules::busy_readers() const {
  if (times.network <= 0 || times.decode <= 0) return -1;
  return 1.2 * (times.decode + times.resize + times.post_processing) / times.network;
}

int FeedRules::readers() const {
  if (limits.network_on_gpu) return std::max(1, limits.threads - 1);
  const double busy = busy_readers();
  return busy < 0 ? limits.threads
                  : static_cast<int>(std::clamp(std::ceil(busy), 1.0, double(limits.threads)));
}

int FeedRules::network_threads() const {
  if (limits.network_on_gpu) return 1;
  // A reader that is idle most of the time leaves its core to the network.
  const double busy = std::max(0.0, busy_readers());
  return static_cast<int>(
      std::clamp(limits.threads - std::floor(busy), 1.0, double(limits.threads)));
}

std::int64_t FeedRules::batch(std::int64_t ready) const {
  const std::int64_t most = std::max<std::int64_t>(1, std::min(ready, limits.most_batch));
  return static_cast<std::int64_t>(std::bit_floor(static_cast<std::uint64_t>(most)));
}

std::int64_t FeedRules::ahead() const {
  // The next batch, the one that is being prepared, and what the readers have in hand.
  const std::int64_t wanted = 2 * limits.most_batch + 2 * readers();
  constexpr std::size_t of_unknown = std::size_t{32} << 20;  // a large picture
  const auto most =
      static_cast<std::int64_t>(limits.most_bytes / (frame_bytes > 0 ? frame_bytes : of_unknown));
  return std::max<std::int64_t>(std::min({wanted, most, limits.most_ahead}), 1);
}

// ---- Threads ----

Feed::Feed(FeedWork& work, FeedLimits limits, Clock clock)
    : work_(work), clock_(std::move(clock)), rules_{limits, {}} {
  rules_.times.budget = limits.threads;
}

Feed::~Feed() {
  for (std::jthread& t : readers_) t.request_stop();
  readers_.clear();
}

FeedTimes Feed::times() const {
  const std::lock_guard lock(mutex_);
  return rules_.times;
}

std::int64_t Feed::before_network() const {
  return std::ssize(waiting_) + preparing_ + std::ssize(ready_);
}

void Feed::check() {
  if (error_) std::rethrow_exception(error_);
}

void Feed::begin() {
  if (!std::exchange(at_work_, true)) began_ = clock_();
  allowed_ = rules_.readers();
  while (std::ssize(readers_) < allowed_)
    readers_.emplace_back([this](const std::stop_token& end) { serve(end); });
}

void Feed::add(std::unique_ptr<FeedUnit> unit) {
  std::unique_lock lock(mutex_);
  check();
  begin();
  waiting_.push_back(std::move(unit));
  tasks_.notify_one();
  while (before_network() >= rules_.ahead()) step(lock, false);
}

void Feed::drain() {
  std::unique_lock lock(mutex_);
  check();
  if (!at_work_) return;
  while (before_network() > 0) step(lock, true);
  changed_.wait(lock, [&] { return error_ || (finishing_.empty() && running_ == 0); });
  check();
  at_work_ = false;
  FeedTimes& t = rules_.times;
  t.elapsed += clock_() - began_;
  t.frames_waited = std::max(0.0, t.threads * t.elapsed - t.decode - t.resize - t.post_processing);
}

// The network runs once while readers prepare other frames.
void Feed::step(std::unique_lock<std::mutex>& lock, bool all) {
  const double begin = clock_();
  // Memory is bounded behind the network, too.
  const std::int64_t most_behind = 2 * rules_.ahead();
  bool run = false, room = false;
  changed_.wait(lock, [&] {
    const std::int64_t behind = std::ssize(finishing_) + running_ - preparing_;
    run = !ready_.empty() && behind < most_behind;
    // Frames that could not be read leave room for others.
    room = before_network() < (all ? 1 : rules_.ahead());
    return error_ || run || room;
  });
  rules_.times.network_waited += clock_() - begin;
  check();
  if (!run) return;
  run_network(lock, rules_.batch(std::ssize(ready_)));
  allowed_ = rules_.readers();
  tasks_.notify_all();
}

void Feed::run_network(std::unique_lock<std::mutex>& lock, std::int64_t frames) {
  Units batch;
  std::vector<FeedUnit*> units;
  for (std::int64_t i = 0; i < frames; ++i) {
    units.push_back(ready_.front().get());
    batch.push_back(std::move(ready_.front()));
    ready_.pop_front();
  }
  const int threads = rules_.network_threads();
  lock.unlock();
  const double seconds = work_.network(units, threads);
  lock.lock();
  rules_.times.network += seconds;
  if (!rules_.limits.network_on_gpu) rules_.times.network_core_seconds += seconds * threads;
  rules_.times.frames += frames;
  rules_.times.batch = std::max(rules_.times.batch, frames);
  ++rules_.times.network_batches;
  for (auto& unit : batch) finishing_.push_back(std::move(unit));
}

void Feed::serve(const std::stop_token& end) {
  std::unique_lock lock(mutex_);
  while (!end.stop_requested()) {
    const auto may_work = [&] { return !error_ && running_ < allowed_ && has_task(); };
    if (!tasks_.wait(lock, end, may_work)) return;
    handle(lock);
    changed_.notify_all();
    // Another reader may have been kept back by this one.
    if (has_task()) tasks_.notify_one();
  }
}

// One task, finishing before preparing: it makes memory free.
void Feed::handle(std::unique_lock<std::mutex>& lock) {
  const bool finishing = !finishing_.empty();
  Units& from = finishing ? finishing_ : waiting_;
  std::unique_ptr<FeedUnit> unit = std::move(from.front());
  from.pop_front();
  rules_.times.threads = std::max(rules_.times.threads, ++running_);
  if (!finishing) ++preparing_;
  FeedWork::Prepared prepared{0, 0, false};
  double finish = 0;
  std::exception_ptr error;
  lock.unlock();
  try {
    if (finishing)
      finish = work_.finish(*unit);
    else
      prepared = work_.prepare(*unit);
  } catch (...) {
    error = std::current_exception();
  }
  if (finishing || !prepared.ready) unit.reset();
  lock.lock();
  --running_;
  if (!finishing) --preparing_;
  if (error) {
    if (!error_) error_ = error;
    return;
  }
  if (finishing) {
    rules_.times.post_processing += finish;
    return;
  }
  rules_.times.decode += prepared.decode;
  rules_.times.resize += prepared.resize;
  if (!prepared.ready) return;
  rules_.frame_bytes = std::max(rules_.frame_bytes, prepared.bytes);
  ready_.push_back(std::move(unit));
}

// ---- Who waited for whom ----

namespace {

using Json = nlohmann::ordered_json;

constexpr std::array<std::pair<const char*, double FeedTimes::*>, 7> stages = {{
    {"decode", &FeedTimes::decode},
    {"resize", &FeedTimes::resize},
    {"network", &FeedTimes::network},
    {"post_processing", &FeedTimes::post_processing},
    {"network_waited", &FeedTimes::network_waited},
    {"frames_waited", &FeedTimes::frames_waited},
    {"network_core_seconds", &FeedTimes::network_core_seconds},
}};

double per(double count, double seconds) { return seconds > 0 ? count / seconds : 0; }

// "41", "2.1", "0.35": no more digits than a measurement has.
std::string rate_text(double rate) {
  return rate >= 20 ? fmt::format("{:.0f}", rate) : fmt::format("{:.2g}", rate);
}

std::string seconds_text(double seconds) {
  return fmt::format("{:.{}f} s", seconds, seconds < 10 ? 2 : 1);
}

}  // namespace

void FeedSummary::add(const FeedTimes& rank) {
  ++ranks;
  cores += rank.budget;
  for (const auto& [name, seconds] : stages) sum.*seconds += rank.*seconds;
  sum.frames += rank.frames;
  sum.elapsed = std::max(sum.elapsed, rank.elapsed);
  sum.batch = std::max(sum.batch, rank.batch);
  sum.threads = std::max(sum.threads, rank.threads);
}

void FeedSummary::add(const Json& share) {
  if (share.value("budget", 0) > 0) add(nlohmann::json(share).get<FeedTimes>());
}

double FeedSummary::rate() const { return per(static_cast<double>(sum.frames), sum.elapsed); }

double FeedSummary::host_rate() const {
  return per(static_cast<double>(sum.frames) * cores,
             sum.decode + sum.resize + sum.post_processing);
}

double FeedSummary::network_rate() const {
  const auto frames = static_cast<double>(sum.frames);
  return on_gpu ? per(frames * ranks, sum.network) : per(frames * cores, sum.network_core_seconds);
}

double FeedSummary::network_busy() const { return per(sum.network, sum.elapsed * ranks); }

std::string FeedSummary::bound() const {
  if (network_rate() < host_rate() || host_rate() == 0) return "network";
  if (sum.post_processing > std::max(sum.decode, sum.resize)) return "post-processing";
  return sum.resize > sum.decode ? "resize" : "decode";
}

std::string FeedSummary::verdict() const {
  const bool network = bound() == "network";
  const std::string other = rate_text(network ? host_rate() : network_rate());
  const std::string on = counted(static_cast<std::int64_t>(cores + 0.5), "core");
  std::string text = fmt::format("{} bounds the job: {} frames/s",
                                 network ? "the network" : bound(), rate_text(rate()));
  if (!on_gpu || !network) text += " on " + on;
  text += network ? fmt::format("; decode, resize and post-processing could do {}", other)
                  : fmt::format("; the network could do {}", other);
  if (on_gpu && network) text += " on " + on;
  return text + fmt::format("; the network was at work {:.1f} % of the time", 100 * network_busy());
}

std::string FeedSummary::waits() const {
  return fmt::format("the network waited {} for frames, readers {} for the network",
                     seconds_text(sum.network_waited), seconds_text(sum.frames_waited));
}

Json FeedSummary::json() const {
  Json j = {
      {"ranks", ranks},       {"cores", cores},         {"network_on", on_gpu ? "GPU" : "CPU"},
      {"frames", sum.frames}, {"seconds", sum.elapsed}, {"frames_a_second", rate()}};
  for (const auto& [name, seconds] : stages) j["stages"][name] = sum.*seconds;
  j["host_frames_a_second"] = host_rate();
  j["network_frames_a_second"] = network_rate();
  j["network_busy_share"] = network_busy();
  j["threads"] = sum.threads;
  j["batch"] = sum.batch;
  j["bound"] = bound();
  j["verdict"] = verdict();
  j["waits"] = waits();
  return j;
}

}  // namespace weft
