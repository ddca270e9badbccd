#include "jobs/score/cores.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <string>

namespace weft {
namespace {

namespace fs = std::filesystem;

TEST(CoreShare, EvenWithTheRemainderInFront) {
  EXPECT_EQ(core_share(16, 3, 0), 6);
  EXPECT_EQ(core_share(16, 3, 1), 5);
  EXPECT_EQ(core_share(16, 3, 2), 5);
  EXPECT_EQ(core_share(2, 8, 7), 1);
  EXPECT_EQ(core_share(2, 1, 0), 2);
}

class HostCoresTest : public ::testing::Test {
 protected:
  void SetUp() override {
    MPI_Comm_rank(MPI_COMM_WORLD, &rank_);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks_);
  }
  int rank_ = 0, ranks_ = 1;
};

TEST_F(HostCoresTest, CoresOfIdleRanksGoToTheOthers) {
  HostCores cores(0, MPI_COMM_WORLD);
  EXPECT_EQ(cores.ranks(), ranks_);
  cores.set_at_work(true);
  MPI_Barrier(MPI_COMM_WORLD);
  EXPECT_EQ(cores.budget(), core_share(cores.cores(), ranks_, rank_));
  MPI_Barrier(MPI_COMM_WORLD);
  if (rank_ == 0) cores.set_at_work(false);
  MPI_Barrier(MPI_COMM_WORLD);
  if (rank_ > 0) {
    EXPECT_EQ(cores.budget(), core_share(cores.cores(), ranks_ - 1, rank_ - 1));
  }
  HostCores fixed(1, MPI_COMM_WORLD);
  EXPECT_EQ(fixed.budget(), 1);
}

TEST_F(HostCoresTest, ACoreHasOneHolder) {
  long pid = getpid();
  MPI_Bcast(&pid, 1, MPI_LONG, 0, MPI_COMM_WORLD);
  const fs::path given = fs::temp_directory_path() / ("weft_cores_" + std::to_string(pid));
  HostCores cores(0, MPI_COMM_WORLD);
  if (rank_ == 0) {
    EXPECT_EQ(cores.take(cores.cores()), cores.cores());
  }
  MPI_Barrier(MPI_COMM_WORLD);
  if (rank_ == 0) {
    std::ofstream{given};
    cores.give(cores.cores());
  } else {
    // All are taken until rank 0 has made the file.
    EXPECT_EQ(cores.take(1), 1);
    EXPECT_TRUE(fs::exists(given));
    cores.give(1);
  }
  MPI_Barrier(MPI_COMM_WORLD);
  // Those that come later get what is given back, also by ranks that waited.
  const int got = cores.take(1);
  EXPECT_EQ(got, 1);
  cores.give(got);
  MPI_Barrier(MPI_COMM_WORLD);
  if (rank_ == 0) fs::remove(given);
}

// Ranks that want all cores at once do not keep a part of them from each other.
TEST_F(HostCoresTest, ATurnIsWhole) {
  HostCores cores(0, MPI_COMM_WORLD);
  const int turn = cores.turn();
  EXPECT_EQ(turn, std::max(cores.budget(), std::min(4, cores.cores())));
  for (int i = 0; i < 20; ++i) {
    EXPECT_EQ(cores.take(turn, turn), turn);
    cores.give(turn);
  }
  HostCores fixed(1, MPI_COMM_WORLD);
  EXPECT_EQ(fixed.turn(), 1);
}

}  // namespace
}  // namespace weft
