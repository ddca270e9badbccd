// The roll of ranks: what each has said, who has claimed what, and what lost ranks leave to others.
#include "infer/rank_roll.h"

#include <gtest/gtest.h>

#include <fmt/format.h>
#include <unistd.h>

#include <filesystem>

namespace weft {
namespace {

namespace fs = std::filesystem;

// A folder that all ranks share, with the job's name for one of its own.
fs::path shared_folder() {
  int rank = 0;
  long pid = getpid();
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Bcast(&pid, 1, MPI_LONG, 0, MPI_COMM_WORLD);
  return fs::temp_directory_path() / fmt::format("weft_roll_{}", pid);
}

TEST(RankRoll, EveryRankReadsWhatEachHasSaid) {
  const fs::path folder = shared_folder();
  {
    RankRoll roll(folder, MPI_COMM_WORLD);
    roll.note_taken(10 + roll.rank());
    roll.note_taken(3);
    roll.note_dropped(3);
    roll.note_failed(10 + roll.rank(), "a clip: two\nlines");
    if (roll.rank() == 0) roll.note_idle();
    MPI_Barrier(MPI_COMM_WORLD);
    for (int r = 0; r < roll.ranks(); ++r) {
      const RankState s = roll.state(r);
      EXPECT_EQ(s.taken, std::vector<std::int64_t>{10 + r});
      EXPECT_TRUE(s.failed.contains(10 + r));
      EXPECT_EQ(s.failures, std::vector<std::string>{"a clip: two lines"});
      EXPECT_EQ(s.idle, r == 0);
      EXPECT_FALSE(s.stopped || s.host.empty());
      EXPECT_FALSE(roll.lost(r));
    }
    int mine = roll.claim("7.0") ? 1 : 0;
    MPI_Allreduce(MPI_IN_PLACE, &mine, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
    EXPECT_EQ(mine, 1);
    roll.note_end("{\"all\": \"said\"}");
    roll.wait_for_ends();
    for (int r = 0; r < roll.ranks(); ++r) EXPECT_EQ(roll.state(r).end, "{\"all\": \"said\"}");
  }
  MPI_Barrier(MPI_COMM_WORLD);
  EXPECT_FALSE(fs::exists(folder));
}

// Three ranks, of which rank 1 is lost: it had finished 1, failed in 3 and had 4 in hand.
std::vector<LeftPlace> left(bool lost_too) {
  std::vector<RankState> states(3);
  states[0].taken = {0, 5};
  states[1].taken = {1, 3, 4};
  states[1].failed = {3};
  states[2].taken = {2, 4};
  return left_places(states, {false, true, lost_too}, 7, true,
                     [](int rank, std::int64_t place) { return rank == 1 && place == 1; });
}

TEST(LeftPlaces, AreThoseThatNobodyHasInHandFinishedOrFailed) {
  const auto one = left(false), two = left(true);
  const auto open = [](const std::vector<LeftPlace>& places) {
    std::vector<std::int64_t> found;
    for (std::size_t p = 0; p < places.size(); ++p)
      if (places[p].open) found.push_back(static_cast<std::int64_t>(p));
    return found;
  };
  // 4 is rank 2's now; 6 nobody has said to have taken.
  EXPECT_EQ(open(one), std::vector<std::int64_t>{6});
  EXPECT_EQ(open(two), (std::vector<std::int64_t>{2, 4, 6}));
  EXPECT_EQ(two[2].losses, 1);
  EXPECT_EQ(two[4].losses, most_losses);
  EXPECT_EQ(two[6].losses, 0);
}

TEST(LeftPlaces, AreNoneWhileAllAreThereAndAQueueHasGivenThemOut) {
  const std::vector<RankState> states(2);
  const auto never = [](int, std::int64_t) { return false; };
  for (const bool queued : {true, false})
    for (const LeftPlace& p : left_places(states, {false, false}, 3, queued, never))
      EXPECT_EQ(p.open, !queued);
}

}  // namespace
}  // namespace weft
