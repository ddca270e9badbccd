// The shared queue: every item is taken once, by whoever asks, and slow ranks take fewer.
#include "jobs/work_queue.h"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <thread>
#include <vector>

namespace weft {
namespace {

// How often each item was taken, by all ranks.
std::vector<int> take_all(WorkQueue& queue, std::int64_t items, int& mine) {
  std::vector<int> taken(static_cast<std::size_t>(items));
  for (std::int64_t i; (i = queue.next()) >= 0; ++mine) ++taken.at(static_cast<std::size_t>(i));
  return taken;
}

TEST(WorkQueue, GivesEveryItemToOneRank) {
  constexpr std::int64_t items = 500;
  int mine = 0;
  std::vector<int> taken;
  {
    WorkQueue queue(MPI_COMM_WORLD, items);
    taken = take_all(queue, items, mine);
    EXPECT_EQ(queue.next(), -1);  // and goes on saying so
  }
  MPI_Allreduce(MPI_IN_PLACE, taken.data(), static_cast<int>(items), MPI_INT, MPI_SUM,
                MPI_COMM_WORLD);
  EXPECT_EQ(taken, std::vector<int>(items, 1));
}

// So slow that it has its first item in hand while the others take all that there are.
TEST(WorkQueue, ASlowRankTakesFewer) {
  int rank = 0, ranks = 1, mine = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &ranks);
  if (ranks == 1) GTEST_SKIP();
  {
    WorkQueue queue(MPI_COMM_WORLD, 40);
    if (rank == 0) mine += queue.next() >= 0;
    MPI_Barrier(MPI_COMM_WORLD);
    // Their parent's number is the same for all. Rank 0, whose the counter is, computes: it calls no MPI meanwhile.
    const auto done = [](int r) {
      return std::filesystem::temp_directory_path() / fmt::format("weft_queue_{}_{}", getppid(), r);
    };
    if (rank != 0) {
      take_all(queue, 40, mine);
      std::ofstream(done(rank)) << "through";
    } else {
      for (int r = 1; r < ranks; ++r)
        while (!std::filesystem::remove(done(r)))
          std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    MPI_Barrier(MPI_COMM_WORLD);
    EXPECT_EQ(queue.next(), -1);
  }
  int slow = mine, all = 0;
  MPI_Bcast(&slow, 1, MPI_INT, 0, MPI_COMM_WORLD);
  MPI_Allreduce(&mine, &all, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
  EXPECT_EQ(slow, 1);
  EXPECT_EQ(all, 40);
}

TEST(WorkQueue, OnlyTheTakersTakePart) {
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm takers;
  MPI_Comm_split(MPI_COMM_WORLD, rank % 2 == 0 ? 0 : MPI_UNDEFINED, 0, &takers);
  int mine = 0;
  {
    WorkQueue queue(takers, 9);
    if (takers != MPI_COMM_NULL) take_all(queue, 9, mine);
  }
  MPI_Allreduce(MPI_IN_PLACE, &mine, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
  EXPECT_EQ(mine, 9);
  if (takers != MPI_COMM_NULL) MPI_Comm_free(&takers);
}

TEST(WorkQueue, OneRankClosesItForAll) {
  int rank = 0, ranks = 1;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &ranks);
  WorkQueue queue(MPI_COMM_WORLD, 1000);
  EXPECT_GE(queue.next(), 0);
  MPI_Barrier(MPI_COMM_WORLD);
  if (rank == ranks - 1) {
    std::jthread([&] { queue.close(); }).join();
    queue.close();
  }
  MPI_Barrier(MPI_COMM_WORLD);
  EXPECT_EQ(queue.next(), -1);
}

TEST(WorkQueue, MayBeEmpty) {
  WorkQueue queue(MPI_COMM_WORLD, 0);
  EXPECT_EQ(queue.next(), -1);
}

}  // namespace
}  // namespace weft
