#include "jobs/engine/queue.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstring>
#include <exception>
#include <mutex>
#include <sstream>

#include "core/clock.h"
#include "core/error.h"
#include "core/log.h"
#include "parallel/broadcast.h"

namespace weft {
namespace {

namespace fs = std::filesystem;

constexpr const char* stop_mark = "stop";

}  // namespace

RankGroups::RankGroups(MPI_Comm world, int ranks_a_group) : size(ranks_a_group) {
  int ranks = 1;
  MPI_Comm_rank(world, &rank);
  MPI_Comm_size(world, &ranks);
  count = ranks / size;
  index = rank / size;
  first = rank % size == 0;
  if (size > 1) MPI_Comm_split(world, index, rank, &group);
}

RankGroups::~RankGroups() {
  // Freeing is collective.
  if (std::uncaught_exceptions() == 0 && group != MPI_COMM_NULL) MPI_Comm_free(&group);
}

std::vector<int> RankGroups::mates() const {
  std::vector<int> ranks;
  for (int r = index * size; r < (index + 1) * size; ++r)
    if (r != rank) ranks.push_back(r);
  return ranks;
}

void RankGroups::share(std::vector<std::int64_t>& numbers) const {
  if (size == 1) return;
  broadcast_sized(numbers, group);
}

StopState::StopState(Members& members, const fs::path& directory, double margin)
    : members_(members), requests_(directory, margin) {
  thread_ = std::jthread([this](const std::stop_token& end) { watch(end); });
}

bool StopState::look() {
  if (requested_) return true;
  // Opening the folder makes a network file system drop its cached answer that the mark is missing.
  const int folder = ::open(members_.directory().c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (folder < 0) return false;
  const bool marked = ::faccessat(folder, stop_mark, F_OK, 0) == 0;
  ::close(folder);
  if (marked && !requested_.exchange(true)) log::info("stopping: another rank was asked to");
  return marked;
}

// In a thread of its own: an item may take minutes, and the other ranks must know before they begin
// another one.
void StopState::watch(const std::stop_token& end) {
  std::mutex mutex;
  std::unique_lock lock(mutex);
  std::condition_variable_any ended;
  int coordinator = 0;  // no rank below it lives
  // Seconds; longer with many ranks, which look into the same folder.
  const double every = std::max(1.0, members_.ranks() / 200.0);
  for (double next = now_seconds() + every; !end.stop_requested();) {
    if ((requests_.look(longest_, 0, coordinator == members_.rank()) & request::stop) != 0) {
      requested_ = true;
      members_.note_stopped();
      members_.claim(stop_mark);
      return;
    }
    if (now_seconds() >= next) {
      next = now_seconds() + every;
      if (look()) return;
      while (coordinator < members_.rank() && members_.failed(coordinator)) ++coordinator;
    }
    ended.wait_for(lock, end, std::chrono::milliseconds(100), [] { return false; });
  }
}

std::int64_t places_a_claim(double claim_seconds, double place_seconds, std::int64_t remaining,
                            int takers) {
  // 200: claims then take half a percent of the work (queue.h).
  const double wanted = place_seconds > 0 ? std::ceil(200 * claim_seconds / place_seconds) : 1;
  const auto most = static_cast<double>(remaining / (4 * static_cast<std::int64_t>(takers)));
  return std::max<std::int64_t>(1, static_cast<std::int64_t>(std::min(wanted, most)));
}

WorkQueue::WorkQueue(Members& members, StopState* stop, const RankGroups& groups,
                     std::int64_t places, bool shared, Resolved resolved, MPI_Comm world,
                     int takers_a_lane)
    : members_(members),
      stop_(stop),
      groups_(groups),
      places_(places),
      shared_(shared && groups.count > 1),
      resolved_(std::move(resolved)),
      takers_a_lane_(takers_a_lane) {
  if (!shared_) {
    at_ = places * groups.index / groups.count;
    end_ = places * (groups.index + 1) / groups.count;
  }
  if (shared_) {
    lanes_ = (groups_.count + takers_a_lane_ - 1) / takers_a_lane_;
    lane_ = groups_.index % lanes_;
  }
  tokens_.resize(static_cast<std::size_t>(lanes_), 0);
  if (shared_ && members_.rank() == 0) {
    std::error_code failure;  // claiming the tokens would fail too
    fs::create_directory(members_.directory() / "queue", failure);
    for (std::int64_t lane = 0; lane < lanes_; ++lane)
      members_.claim(fmt::format("queue/{}.0", lane));
  }
  MPI_Barrier(world);
  given_ = now_seconds();
}

fs::path WorkQueue::token(std::int64_t lane, std::int64_t next) const {
  return members_.directory() / "queue" / fmt::format("{}.{}", lane, next);
}

// A listing may miss a token that is being renamed, so this repeats until the token of this rank's
// lane has moved on.
void WorkQueue::find_tokens() {
  const fs::path folder = members_.directory() / "queue";
  const std::int64_t before = tokens_[static_cast<std::size_t>(lane_)];
  for (int tries = 0; tries < 10000; ++tries) {
    if (tries > 10) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    std::error_code failure;
    for (const auto& entry : fs::directory_iterator(folder, failure)) {
      std::istringstream name(entry.path().filename().string());
      std::size_t lane = tokens_.size();
      std::int64_t next = -1;
      char dot = 0;
      name >> lane >> dot >> next;
      if (lane < tokens_.size()) tokens_[lane] = std::max(tokens_[lane], next);
    }
    if (tokens_[static_cast<std::size_t>(lane_)] > before) return;
  }
  throw Error(Exit::data, fmt::format("a token of the queue in {} is gone", folder.string()),
              "leave that folder alone while a job runs; the same command makes what is missing",
              __FILE__, __LINE__);
}

// Claims the next places for this group; false if there are none.
bool WorkQueue::claim() {
  const double begin = now_seconds();
  for (;;) {
    if (remaining(lane_) <= 0)
      for (std::int64_t lane = 0; lane < lanes_; ++lane)
        if (remaining(lane) > remaining(lane_)) lane_ = lane;
    if (remaining(lane_) <= 0) return false;
    std::int64_t& next = tokens_[static_cast<std::size_t>(lane_)];
    const std::int64_t n = places_a_claim(claim_, place_, remaining(lane_), takers_a_lane_);
    if (std::rename(token(lane_, next).c_str(), token(lane_, next + n).c_str()) != 0) {
      // Another rank was first.
      WEFT_CHECK(errno == ENOENT || errno == ESTALE, Exit::data, "may all ranks write there?",
                 "cannot rename {}: {}", token(lane_, next).string(), std::strerror(errno));
      find_tokens();
      continue;
    }
    at_ = next;
    next = end_ = next + n;
    several_ = n > 1;
    members_.note_taken(place_of(at_), n, lanes_);
    const double seconds = now_seconds() - begin;
    claim_ = claims_ == 0 ? seconds : 0.75 * claim_ + 0.25 * seconds;
    claim_total_ += seconds;
    ++claims_;
    return true;
  }
}

std::int64_t WorkQueue::share(std::int64_t place) const {
  if (groups_.size > 1) MPI_Bcast(&place, 1, MPI_INT64_T, 0, groups_.group);
  return place;
}

std::int64_t WorkQueue::next() {
  if (!groups_.first) return share(-1);
  const double seconds = now_seconds() - given_;
  // The time since the last call is that of the place it returned.
  if (claims_ > 0) place_ = place_ == 0 ? seconds : 0.75 * place_ + 0.25 * seconds;
  std::int64_t place = -1;
  if (shared_) {
    if (at_ < end_ && stop_ != nullptr && stop_->requested()) {
      members_.note_dropped(place_of(at_), end_ - at_, lanes_);
      at_ = end_;
    }
    if (at_ < end_ || (!stopped() && claim())) place = place_of(at_++);
    if (place >= 0 && several_) members_.note_begun(place);
  } else if (at_ < end_ && !stopped()) {
    place = at_++;
    if (groups_.count > 1) members_.note_taken(place);  // alone, it leaves nothing to others
  }
  given_ = now_seconds();
  return share(place);
}

std::int64_t WorkQueue::leftover() {
  if (!groups_.first || groups_.count == 1) return share(-1);
  members_.note_idle();
  for (;;) {
    if (const std::int64_t place = stopped() ? -1 : take_over(); place >= 0) return share(place);
    // A rank notes what it takes before it claims it, and is not idle from then on. So if all are
    // idle in a look after this rank's vain attempt, nothing is left.
    bool over = others_idle_ || stop_->requested();
    for (int r = 0; r < members_.ranks() && over; r += groups_.size)
      over = r == members_.rank() || members_.failed(r) || members_.state(r).idle;
    if (over) return share(-1);
    members_.pause();
  }
}

// Noted before it is claimed: others that find the place claimed wait for this rank, and if it
// fails in between, they know that it had the place in hand.
bool WorkQueue::take(std::int64_t place, int losses) {
  members_.note_taken(place);
  if (members_.claim(fmt::format("{}.{}", place, losses))) return true;
  members_.note_dropped(place);
  return false;
}

// Takes over an open place, or returns -1. Places seen open before are tried first: if another rank
// has taken one since, the claim fails.
std::int64_t WorkQueue::take_over() {
  const auto try_open = [&]() -> std::int64_t {
    while (!open_.empty()) {
      const Open o = open_.back();
      open_.pop_back();
      retried_ = o.losses > 0;
      if (take(o.place, o.losses)) return o.place;
      members_.note_idle();
    }
    return -1;
  };
  if (const std::int64_t place = try_open(); place >= 0) return place;
  // Liveness first, then states: once a rank has failed, its notes no longer change.
  std::vector<bool> failed;
  for (int r = 0; r < members_.ranks(); ++r) failed.push_back(members_.failed(r));
  std::vector<MemberState> states;
  others_idle_ = true;
  for (int r = 0; r < members_.ranks(); ++r) {
    states.push_back(members_.state(r));
    if (r % groups_.size == 0 && r != members_.rank() && !failed[static_cast<std::size_t>(r)])
      others_idle_ = others_idle_ && states.back().idle;
  }
  const std::vector<LeftPlace> left = left_places(states, failed, places_, others_idle_, resolved_);
  for (std::int64_t place = 0; place < places_; ++place)
    if (const LeftPlace& p = left[static_cast<std::size_t>(place)];
        p.open && p.losses < most_losses)
      open_.push_back({place, p.losses});
  // Each group begins at another place, so that they do not all try the same one.
  std::rotate(open_.begin(), open_.begin() + std::ssize(open_) * groups_.index / groups_.count,
              open_.end());
  return try_open();
}

std::vector<LeftPlace> left_places(const std::vector<MemberState>& states,
                                   const std::vector<bool>& failed, std::int64_t places,
                                   bool untaken, const WorkQueue::Resolved& resolved) {
  std::vector<LeftPlace> left(static_cast<std::size_t>(places));
  std::vector<bool> held(left.size(), false), taken(left.size(), false);
  for (std::size_t r = 0; r < states.size(); ++r)
    for (const std::int64_t place : states[r].taken) {
      const auto p = static_cast<std::size_t>(place);
      WEFT_ASSERT(p < left.size());
      taken[p] = true;
      if (failed[r] && !resolved(static_cast<int>(r), place))
        left[p].losses += states[r].begun.contains(place) ? 1 : 0;
      else
        held[p] = true;
    }
  for (std::size_t p = 0; p < left.size(); ++p) left[p].open = !held[p] && (taken[p] || untaken);
  return left;
}

}  // namespace weft
