// Who makes what, and until when: groups of ranks, the request to stop, and the queue from which
// groups claim places.
//
// Places are claimed by renaming a token: the file DIR/queue/L.P says that the places of lane L are
// free from its P-th on, and a rank claims the next n by renaming it to L.P+n, which succeeds for
// one rank alone. The others get ENOENT, list the folder (opening it makes a network file system
// look anew) and try again. Of K lanes, lane L has the places L, L+K, L+2K ...: with a lane for
// each eight takers, few meet at one token, and a rank whose lane is empty goes on in the
// fullest. The winner then notes in its member file what it has taken. No rank owns the queue, so
// no rank's failure stops it. A place that nobody has taken, or that only failed ranks have, is
// taken over at the end: when all living ranks are idle, none can be between rename and note. This
// covers a rank that failed just there, and a rename that succeeded but whose reply was lost on the
// network.
#pragma once

#include <mpi.h>

#include <atomic>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "jobs/engine/members.h"
#include "train/stop.h"

namespace weft {

// Ranks that make items together: `size` neighbours a group.
struct RankGroups {
  int rank = 0, count = 1, index = 0, size = 1;
  MPI_Comm group = MPI_COMM_NULL;  // null for groups of one
  bool first = true;               // of its group: it claims places for all

  // Collective; so is the destructor, except during stack unwinding.
  RankGroups(MPI_Comm world, int size);
  ~RankGroups();
  RankGroups(const RankGroups&) = delete;
  RankGroups& operator=(const RankGroups&) = delete;

  std::vector<int> mates() const;  // the other ranks of this one's group
  // The first rank's numbers on all of its group.
  void share(std::vector<std::int64_t>& numbers) const;
};

// One protocol for all list jobs: the rank that is asked (by a signal; the first living rank also
// by the file DIR/stop and the approaching end of the Slurm job) leaves a mark in the members'
// folder. The others check it every second, or two with hundreds of ranks, and before each claim.
class StopState {
 public:
  // `directory`: where a user may put the file `stop`. `margin`: run.stop_margin, seconds.
  StopState(Members& members, const std::filesystem::path& directory, double margin);
  StopState(const StopState&) = delete;
  StopState& operator=(const StopState&) = delete;

  // Whether any rank was asked, as far as this one knows. Once true, stays true. Thread-safe.
  bool requested() const { return requested_; }
  // The same, after checking the mark.
  bool look();
  // Seconds that an item has taken: another one must end before the margin begins.
  void took(double seconds) { longest_ = std::max(longest_.load(), seconds); }

 private:
  void watch(const std::stop_token& end);

  Members& members_;
  Requests requests_;
  std::atomic<double> longest_ = 0;
  std::atomic<bool> requested_ = false;
  std::jthread thread_;
};

// How many places a claim takes, so that claims stay under 1 % of the work. The measured times of a
// claim, contention included, and of a place account for half of that; the other half is for the
// beginning and the end, where claims are small. At most a quarter of a taker's share of the
// remaining places, so that all end together.
std::int64_t places_a_claim(double claim_seconds, double place_seconds, std::int64_t remaining,
                            int takers);

class WorkQueue {
 public:
  // Whether a rank that failed has finished or failed all items of a place that it had taken.
  using Resolved = std::function<bool(int rank, std::int64_t place)>;
  // Collective: ends with a barrier. Places are 0 ... places - 1, in that order; with `shared`
  // whoever is free claims the next ones, otherwise each group has its part of them. `stop` may be
  // null: then nothing stops it, and there are no leftovers to ask for.
  WorkQueue(Members& members, StopState* stop, const RankGroups& groups, std::int64_t places,
            bool shared, Resolved resolved, MPI_Comm world, int takers_a_lane = 8);

  // The group's next place, or -1: there are no more, or the job is to stop. Alike on all ranks of
  // a group.
  std::int64_t next();
  // After that, with nothing in hand: a place that no living rank has taken, or -1 once all other
  // groups have nothing in hand either. Waits for them.
  std::int64_t leftover();
  // Whether a failed rank had leftover()'s last place in hand.
  bool retried() const { return retried_; }
  // Returns a place from next() to the queue; nobody may have begun it.
  void drop(std::int64_t place) { members_.note_dropped(place); }

  // Claims so far, and seconds that they took.
  std::int64_t claims() const { return claims_; }
  double claim_seconds() const { return claim_total_; }

 private:
  bool stopped() const { return stop_ != nullptr && stop_->look(); }
  bool claim();
  void find_tokens();
  std::filesystem::path token(std::int64_t lane, std::int64_t next) const;
  std::int64_t remaining(std::int64_t lane) const {
    return (places_ - lane + lanes_ - 1) / lanes_ - tokens_[static_cast<std::size_t>(lane)];
  }
  std::int64_t place_of(std::int64_t next) const { return lane_ + lanes_ * next; }
  std::int64_t share(std::int64_t place) const;
  bool take(std::int64_t place, int losses);
  std::int64_t take_over();

  Members& members_;
  StopState* stop_;
  const RankGroups& groups_;
  std::int64_t places_;
  bool shared_, retried_ = false;
  Resolved resolved_;
  int takers_a_lane_;
  std::int64_t lanes_ = 1, lane_ = 0;  // how many; that of the last claim
  std::vector<std::int64_t> tokens_;   // [lanes], as seen last
  std::int64_t at_ = 0, end_ = 0;      // of the lane, what this group has claimed and not yet begun
  bool several_ = false;               // whether that claim was of several places
  std::int64_t claims_ = 0;
  double claim_total_ = 0, claim_ = 0, place_ = 0, given_ = 0;  // seconds; when next() returned
  struct Open {
    std::int64_t place;
    int losses;
  };
  std::vector<Open> open_;  // as seen last, from the back on
  bool others_idle_ = false;
};

// How many ranks have failed while working on a place, and whether it is still to be made: no
// living rank has it, and it is not resolved. After two failures it is given up: the item itself
// may cause them.
struct LeftPlace {
  int losses = 0;
  bool open = false;
};
constexpr int most_losses = 2;
// The same for all places, from all ranks' states. `untaken`: whether places count as open that
// nobody has taken.
std::vector<LeftPlace> left_places(const std::vector<MemberState>& states,
                                   const std::vector<bool>& failed, std::int64_t places,
                                   bool untaken, const WorkQueue::Resolved& resolved);

}  // namespace weft
