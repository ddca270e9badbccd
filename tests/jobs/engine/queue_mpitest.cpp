// Members and their queue: what each has reported, who has claimed what, and what failed ranks
// leave to others.
#include "jobs/engine/queue.h"

#include <gtest/gtest.h>

#include <fmt/format.h>
#include <sys/file.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <thread>

#include "core/clock.h"
#include "core/error.h"

namespace weft {
namespace {

namespace fs = std::filesystem;

// A folder that all ranks share, with the job's name for one of its own.
fs::path shared_folder() {
  int rank = 0;
  long pid = getpid();
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Bcast(&pid, 1, MPI_LONG, 0, MPI_COMM_WORLD);
  return fs::temp_directory_path() / fmt::format("weft_queue_{}", pid);
}

TEST(Members, EveryRankReadsWhatEachHasReported) {
  const fs::path folder = shared_folder();
  {
    Members members(folder, "x.output", MPI_COMM_WORLD);
    members.note_taken(10 + members.rank(), 5);
    members.note_taken(100, 3, 10);
    members.note_dropped(110, 2, 10);
    members.note_dropped(100);
    members.note_dropped(13 + members.rank());
    members.note_failed(10 + members.rank(), "a clip: two\nlines");
    members.note_resolved(20 + members.rank());
    if (members.rank() == 0) members.note_idle();
    MPI_Barrier(MPI_COMM_WORLD);
    for (int r = 0; r < members.ranks(); ++r) {
      const MemberState s = members.state(r);
      EXPECT_EQ(s.taken, (std::set<std::int64_t>{10 + r, 11 + r, 12 + r, 14 + r}));
      EXPECT_EQ(s.resolved, (std::set<std::int64_t>{10 + r, 20 + r}));
      EXPECT_EQ(s.failures, std::vector<std::string>{"a clip: two lines"});
      EXPECT_EQ(s.idle, r == 0);
      EXPECT_FALSE(s.stopped || s.host.empty());
      EXPECT_FALSE(members.failed(r));
    }
    int mine = members.claim("7.0") ? 1 : 0;
    MPI_Allreduce(MPI_IN_PLACE, &mine, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
    EXPECT_EQ(mine, 1);
    members.note_summary("{\"all\": \"said\"}");
    members.wait_for_summaries();
    for (int r = 0; r < members.ranks(); ++r)
      EXPECT_EQ(members.state(r).summary, "{\"all\": \"said\"}");
  }
  MPI_Barrier(MPI_COMM_WORLD);
  EXPECT_FALSE(fs::exists(folder));
  MPI_Barrier(MPI_COMM_WORLD);  // before the next test makes it again
}

// Collective: nobody makes it again before it is gone.
void remove_shared(const fs::path& folder) {
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Barrier(MPI_COMM_WORLD);
  if (rank == 0) fs::remove_all(folder);
  MPI_Barrier(MPI_COMM_WORLD);
}

// As if this process were gone: the others find its lock lifted.
void unlock(const fs::path& file) {
  for (const auto& entry : fs::directory_iterator("/proc/self/fd")) {
    std::error_code gone;
    if (fs::read_symlink(entry.path(), gone) == file)
      flock(std::stoi(entry.path().filename()), LOCK_UN);
  }
}

TEST(Members, AnErrorThatUnwindsIsNoFailedRank) {
  const fs::path folder = shared_folder();
  int rank = 0, ranks = 1;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &ranks);
  const int last = ranks - 1;
  if (rank == last) {
    try {
      const Members members(folder, "x.output", MPI_COMM_WORLD);
      throw 1;
    } catch (int) {
    }
    unlock(folder / std::to_string(last));
    MPI_Barrier(MPI_COMM_WORLD);
    MPI_Barrier(MPI_COMM_WORLD);  // the others' destructors
  } else {
    Members members(folder, "x.output", MPI_COMM_WORLD);
    MPI_Barrier(MPI_COMM_WORLD);
    EXPECT_FALSE(members.failed(last));
  }
  remove_shared(folder);
}

TEST(Members, FoldersThatAreNotSharedAreRefused) {
  const fs::path folder = shared_folder();
  int rank = 0, ranks = 1;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &ranks);
  if (ranks == 1) GTEST_SKIP() << "one rank shares with nobody";
  const fs::path mine = folder / fmt::format("host{}", rank);
  for (int r = 0; r < ranks && rank == 0; ++r)
    fs::create_directories(folder / fmt::format("host{}", r));
  MPI_Barrier(MPI_COMM_WORLD);
  try {
    const Members members(mine, "x.output", MPI_COMM_WORLD);
    ADD_FAILURE() << "not refused";
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), Exit::data);
    EXPECT_NE(std::string(e.hint()).find("all ranks share"), std::string::npos) << e.hint();
  }
  remove_shared(folder);
}

// A queue over all ranks, in a folder that goes with it.
struct Queue {
  explicit Queue(std::int64_t places, bool shared = true, int takers_a_lane = 8)
      : members(folder / ".ranks", "x.output", MPI_COMM_WORLD),
        stop(members, folder, 0),
        groups(MPI_COMM_WORLD, 1),
        queue(
            members, &stop, groups, places, shared, [](int, std::int64_t) { return false; },
            MPI_COMM_WORLD, takers_a_lane),
        made(static_cast<std::size_t>(places), 0) {}
  bool make(std::int64_t place) {
    if (place >= 0) ++made.at(static_cast<std::size_t>(place));
    return place >= 0;
  }
  void make_all() {
    while (make(queue.next())) queue.took(1e-6);
    while (make(queue.leftover())) continue;
  }
  std::vector<int> made_by_all() const {
    std::vector<int> sum(made.size());
    MPI_Allreduce(made.data(), sum.data(), static_cast<int>(made.size()), MPI_INT, MPI_SUM,
                  MPI_COMM_WORLD);
    return sum;
  }

  fs::path folder = shared_folder();
  Members members;
  StopState stop;
  RankGroups groups;
  WorkQueue queue;
  std::vector<int> made;
};

TEST(WorkQueue, GivesEveryPlaceToOneRank) {
  for (const int lanes : {1, 2, 4})
    for (const std::int64_t places : {0, 1, 3, 500, 20000}) {
      Queue q(places, true, 4 / lanes);
      q.make_all();
      EXPECT_EQ(q.made_by_all(), std::vector<int>(static_cast<std::size_t>(places), 1));
      EXPECT_EQ(q.queue.next(), -1);  // and goes on saying so
      if (q.groups.count > 1 && places == 20000) {
        EXPECT_LT(q.queue.claims(), 10000) << "places of no work at all are claimed many at a time";
      }
    }
}

// It has its first places in hand while the others make all there are.
TEST(WorkQueue, ASlowRankTakesFewer) {
  Queue q(40);
  if (q.groups.count == 1) GTEST_SKIP();
  const bool slow = q.groups.rank == 0;
  if (slow) q.make(q.queue.next());
  MPI_Barrier(MPI_COMM_WORLD);
  if (!slow)
    while (q.make(q.queue.next())) continue;
  MPI_Barrier(MPI_COMM_WORLD);
  EXPECT_TRUE(!slow || q.queue.next() == -1);
  EXPECT_EQ(q.made_by_all(), std::vector<int>(40, 1));
}

TEST(WorkQueue, OneRankStopsItForAll) {
  Queue q(1000);
  EXPECT_GE(q.queue.next(), 0);
  MPI_Barrier(MPI_COMM_WORLD);
  if (q.groups.rank == q.groups.count - 1) q.members.claim("stop");
  MPI_Barrier(MPI_COMM_WORLD);
  EXPECT_TRUE(q.stop.look());
  EXPECT_EQ(q.queue.next(), -1);
  EXPECT_EQ(q.queue.leftover(), -1);
}

// The token was renamed, but the rename's reply was lost: nobody has noted its place.
TEST(WorkQueue, APlaceThatNobodyHasNotedIsTakenOver) {
  Queue q(12);
  if (q.groups.count == 1) GTEST_SKIP() << "one rank alone needs no token";
  if (q.groups.rank == 0) {
    const fs::path token = q.folder / ".ranks" / "queue";
    fs::rename(token / "0.0", token / "0.2");
  }
  MPI_Barrier(MPI_COMM_WORLD);
  q.make_all();
  EXPECT_EQ(q.made_by_all(), std::vector<int>(12, 1));
}

// The last rank fails with its first place in hand, rank 0 is slow, and those between are through
// before it goes on. Every place is made once, but the failed rank's, which it had begun.
TEST(WorkQueue, GivesEveryPlaceOnceWhenARankFails) {
  for (const bool shared : {false, true}) {
    Queue q(3 * 4, shared);
    const int last = q.members.ranks() - 1;
    if (last == 0) GTEST_SKIP() << "nobody would be left";
    const bool fails = q.members.rank() == last, slow = q.members.rank() == 0;
    if (slow) q.make(q.queue.next());
    if (fails) {
      EXPECT_GE(q.queue.next(), 0);
      unlock(q.folder / ".ranks" / std::to_string(last));
    }
    MPI_Barrier(MPI_COMM_WORLD);
    EXPECT_EQ(q.members.failed(last), !fails);
    if (!slow && !fails)
      while (q.make(q.queue.next())) continue;
    MPI_Barrier(MPI_COMM_WORLD);
    if (!fails) q.make_all();
    EXPECT_EQ(q.made_by_all(), std::vector<int>(12, 1)) << (shared ? "shared" : "dealt out");
  }
}

// A measurement, not a test: claims a second, and their share of the takers' time, for
// WEFT_CLAIM_PLACES places that take WEFT_CLAIM_MICROSECONDS each. --gtest_also_run_disabled_tests
// --gtest_filter='*ClaimRate'
TEST(WorkQueue, DISABLED_ClaimRate) {
  const auto number = [](const char* name, std::int64_t otherwise) {
    const char* text = std::getenv(name);
    return text == nullptr ? otherwise : std::atoll(text);
  };
  const std::int64_t places = number("WEFT_CLAIM_PLACES", 10000);
  const std::int64_t microseconds = number("WEFT_CLAIM_MICROSECONDS", 0);
  Queue q(places);
  MPI_Barrier(MPI_COMM_WORLD);
  const double begin = now_seconds();
  for (double start = now_seconds(); q.make(q.queue.next()); start = now_seconds()) {
    if (microseconds > 0) std::this_thread::sleep_for(std::chrono::microseconds(microseconds));
    q.queue.took(now_seconds() - start);
  }
  double mine[3] = {now_seconds() - begin, q.queue.claim_seconds(),
                    static_cast<double>(q.queue.claims())};
  double sum[3] = {}, longest = 0;
  MPI_Allreduce(mine, sum, 3, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD);
  MPI_Allreduce(mine, &longest, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
  while (q.make(q.queue.leftover())) continue;
  EXPECT_EQ(q.made_by_all(), std::vector<int>(static_cast<std::size_t>(places), 1));
  if (q.groups.rank == 0)
    std::printf(
        "%d takers, %lld places of %lld us: %.3f s, %.0f claims of %.1f places (%.0f a second), "
        "%.0f us each, %.2f %% of the time\n",
        q.groups.count, static_cast<long long>(places), static_cast<long long>(microseconds),
        longest, sum[2], static_cast<double>(places) / sum[2], sum[2] / longest,
        1e6 * sum[1] / sum[2], 100 * sum[1] / sum[0]);
}

TEST(PlacesAClaim, KeepClaimsUnderOnePercentAndLeaveAShareForAll) {
  EXPECT_EQ(places_a_claim(0.001, 0, 1000000, 4), 1) << "nothing measured yet";
  EXPECT_EQ(places_a_claim(0.001, 60, 1000000, 4), 1);
  EXPECT_EQ(places_a_claim(0.001, 0.01, 1000000, 4), 20);
  EXPECT_EQ(places_a_claim(0.001, 0.0001, 1000000, 4), 2000);
  EXPECT_EQ(places_a_claim(0.001, 0.0001, 1600, 4), 100) << "a quarter of a taker's share";
  EXPECT_EQ(places_a_claim(0.001, 0.0001, 3, 4), 1);
}

// Three ranks, of which rank 1 has failed: it had finished 1, failed at 3 and had 4 in hand. Rank 2
// has claimed 2 and 4 together, and has begun 4 alone.
std::vector<LeftPlace> left(bool two_failed, bool untaken = true) {
  std::vector<MemberState> states(3);
  states[0].taken = {0, 5};
  states[1].taken = {1, 3, 4};
  states[2].taken = {2, 4};
  states[1].begun = {1, 3, 4};
  states[2].begun = {4};
  return left_places(
      states, {false, true, two_failed}, 7, untaken,
      [](int rank, std::int64_t place) { return rank == 1 && (place == 1 || place == 3); });
}

TEST(LeftPlaces, AreThoseThatNobodyHasInHandFinishedOrFailed) {
  const auto one = left(false), two = left(true);
  const auto open = [](const std::vector<LeftPlace>& places) {
    std::vector<std::int64_t> found;
    for (std::size_t p = 0; p < places.size(); ++p)
      if (places[p].open) found.push_back(static_cast<std::int64_t>(p));
    return found;
  };
  // 4 is rank 2's now; 6 nobody has taken.
  EXPECT_EQ(open(one), std::vector<std::int64_t>{6});
  EXPECT_EQ(open(two), (std::vector<std::int64_t>{2, 4, 6}));
  EXPECT_EQ(two[2].losses, 0) << "claimed, not begun: it cannot be what ended the rank";
  EXPECT_EQ(two[4].losses, most_losses);
  EXPECT_EQ(two[6].losses, 0);
}

TEST(LeftPlaces, ThoseThatNobodyHasTakenOnlyOnceAllAreIdle) {
  EXPECT_TRUE(left(false, true)[6].open);
  EXPECT_FALSE(left(false, false)[6].open);
}

}  // namespace
}  // namespace weft
