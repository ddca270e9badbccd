// The roll of ranks: what each has said, who has claimed what, and what lost ranks leave to others.
#include "jobs/generate/options.h"
#include "jobs/rank_roll.h"

#include <gtest/gtest.h>

#include <fmt/format.h>
#include <sys/file.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "core/error.h"
#include "jobs/clip_queue.h"
#include "jobs/lost_ranks.h"

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
    roll.note_settled(20 + roll.rank());
    if (roll.rank() == 0) roll.note_idle();
    MPI_Barrier(MPI_COMM_WORLD);
    for (int r = 0; r < roll.ranks(); ++r) {
      const RollEntry s = roll.state(r);
      EXPECT_EQ(s.taken, std::vector<std::int64_t>{10 + r});
      EXPECT_EQ(s.settled, (std::set<std::int64_t>{10 + r, 20 + r}));
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

TEST(RankRoll, AnErrorOnItsWayIsNoLoss) {
  const fs::path folder = shared_folder();
  int rank = 0, ranks = 1;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &ranks);
  const int last = ranks - 1;
  if (rank == last) {
    try {
      const RankRoll roll(folder, MPI_COMM_WORLD);
      throw 1;
    } catch (int) {
    }
    unlock(folder / std::to_string(last));
    MPI_Barrier(MPI_COMM_WORLD);
    MPI_Barrier(MPI_COMM_WORLD);  // the others' destructors
  } else {
    RankRoll roll(folder, MPI_COMM_WORLD);
    MPI_Barrier(MPI_COMM_WORLD);
    EXPECT_FALSE(roll.lost(last));
  }
  remove_shared(folder);
}

TEST(RankRoll, FoldersThatAreNotSharedAreRefused) {
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
    const RankRoll roll(mine, MPI_COMM_WORLD);
    ADD_FAILURE() << "not refused";
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), Exit::data);
    EXPECT_NE(std::string(e.hint()).find("all ranks share"), std::string::npos) << e.hint();
  }
  remove_shared(folder);
}

// The last rank is lost with its first clip in hand, rank 0 is slow, and those between are through before it goes on:
// rank 1 takes one of what is left, which may be rank 0's. Every clip is made once.
TEST(ClipQueue, GivesEveryClipOnceWhenARankIsLost) {
  const fs::path folder = shared_folder();
  for (const bool share_out : {false, true}) {
    RankRoll roll(folder / ".ranks", MPI_COMM_WORLD);
    const int last = roll.ranks() - 1;
    if (last == 0) GTEST_SKIP() << "nobody would be left";
    const std::int64_t items = 3 * roll.ranks();
    Deck deck;
    deck.get<GenerateDeck>().share_out = share_out;
    const ClipGroups groups(MPI_COMM_WORLD, 1);
    ClipQueue queue(deck, folder, groups, roll, items, [](int, std::int64_t) { return false; });
    std::vector<int> made(static_cast<std::size_t>(items), 0);
    const auto make = [&](std::int64_t place) {
      if (place >= 0) ++made[static_cast<std::size_t>(place)];
      return place >= 0;
    };
    const auto make_all = [&](auto next) {
      while (make(next())) continue;
    };
    const bool lost = roll.rank() == last, slow = roll.rank() == 0;
    if (slow) make(queue.next());
    if (lost) {
      EXPECT_GE(queue.next(), 0);
      unlock(folder / ".ranks" / std::to_string(last));
    }
    MPI_Barrier(MPI_COMM_WORLD);
    EXPECT_EQ(roll.lost(last), !lost);
    if (!slow && !lost) {
      make_all([&] { return queue.next(); });
      if (roll.rank() == 1) make(queue.leftover());
    }
    MPI_Barrier(MPI_COMM_WORLD);
    if (!lost) {
      make_all([&] { return queue.next(); });
      make_all([&] { return queue.leftover(); });
    }
    MPI_Allreduce(MPI_IN_PLACE, made.data(), static_cast<int>(items), MPI_INT, MPI_SUM,
                  MPI_COMM_WORLD);
    EXPECT_EQ(made, std::vector<int>(static_cast<std::size_t>(items), 1))
        << (share_out ? "one queue" : "dealt out");
  }
  remove_shared(folder);
}

// The last rank is lost in the middle of a batch: it had finished its second clip, failed at the third, and found the fourth
// settled by one lost before. Another makes the rest.
TEST(OrderedClips, OfABatchThatIsLeftWhatIsNotSettledIsMade) {
  const fs::path folder = shared_folder();
  {
    RankRoll roll(folder / ".ranks", MPI_COMM_WORLD);
    const int last = roll.ranks() - 1;
    if (last == 0) GTEST_SKIP() << "nobody would be left";
    GenerateJob job;
    job.items.resize(6);
    for (std::size_t i = 0; i < job.items.size(); ++i) job.items[i].name = fmt::format("clip{}", i);
    OrderedClips clips(folder, job, roll);
    clips.set_batches({{1, 2, 3, 4, 5}, {0}});
    if (roll.rank() == last) {
      roll.note_taken(0);
      roll.note_settled(4);
      ClipManifest manifest(folder, last);
      FinishedClip clip;
      clip.name = clip.file = "clip2";
      std::ofstream(folder / clip.file);
      manifest.add(clip);
      roll.note_failed(3, "not finite");
      unlock(folder / ".ranks" / std::to_string(last));
    }
    MPI_Barrier(MPI_COMM_WORLD);
    if (roll.rank() != last) {
      const TakenClips taken = clips.taken(last, 0);
      EXPECT_EQ(taken.finished, 1);
      EXPECT_EQ(taken.in_hand, (std::vector<std::string>{"clip1", "clip5"}));
      EXPECT_FALSE(clips.settled(last, 0));
      EXPECT_EQ(clips.left(0), (ClipBatch{1, 5}));
      EXPECT_EQ(clips.left(1), (ClipBatch{0}));
    }
    MPI_Barrier(MPI_COMM_WORLD);
  }
  remove_shared(folder);
}

// Three ranks, of which rank 1 is lost: it had finished 1, failed at 3 and had 4 in hand.
std::vector<LeftPlace> left(bool lost_too) {
  std::vector<RollEntry> states(3);
  states[0].taken = {0, 5};
  states[1].taken = {1, 3, 4};
  states[2].taken = {2, 4};
  return left_places(states, {false, true, lost_too}, 7, true, [](int rank, std::int64_t place) {
    return rank == 1 && (place == 1 || place == 3);
  });
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
  const std::vector<RollEntry> states(2);
  const auto never = [](int, std::int64_t) { return false; };
  for (const bool queued : {true, false})
    for (const LeftPlace& p : left_places(states, {false, false}, 3, queued, never))
      EXPECT_EQ(p.open, !queued);
}

}  // namespace
}  // namespace weft
