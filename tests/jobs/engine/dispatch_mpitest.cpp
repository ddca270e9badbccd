// Batches handed out by rank 0: each goes to one rank, a request to stop ends all, reports and the
// exit code pass at the end.
#include "jobs/engine/dispatch.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "core/clock.h"
#include "core/error.h"

namespace weft {
namespace {

namespace fs = std::filesystem;

int rank_of(MPI_Comm world) {
  int rank = 0;
  MPI_Comm_rank(world, &rank);
  return rank;
}
int ranks_of(MPI_Comm world) {
  int ranks = 1;
  MPI_Comm_size(world, &ranks);
  return ranks;
}

// How often all ranks together were granted each batch.
std::vector<int> granted_to_all(std::vector<int> mine) {
  MPI_Allreduce(MPI_IN_PLACE, mine.data(), static_cast<int>(mine.size()), MPI_INT, MPI_SUM,
                MPI_COMM_WORLD);
  return mine;
}

TEST(Dispatcher, GrantsEachBatchOnceRoundByRound) {
  const int ranks = ranks_of(MPI_COMM_WORLD);
  Dispatcher d(MPI_COMM_WORLD);
  for (const std::int64_t batches : {5, 0, 1, 3000}) {
    d.open(std::vector<double>(static_cast<std::size_t>(batches), 1), ranks);
    std::vector<int> mine(static_cast<std::size_t>(batches) + 1, 0);
    for (std::int64_t i, before = -1; (i = d.next()) >= 0; before = i) {
      EXPECT_GT(i, before);
      ++mine.at(static_cast<std::size_t>(i));
    }
    EXPECT_EQ(d.next(), -1) << "and goes on saying so";
    std::vector<int> wanted(mine.size(), 1);
    wanted.back() = 0;
    EXPECT_EQ(granted_to_all(mine), wanted);
  }
  // Rank 0 sends none.
  EXPECT_LT(d.requests(), 1500) << "of many batches several are granted at a time";
  d.gather("");
  EXPECT_EQ(d.conclude(0), 0);
}

TEST(Dispatcher, GathersReportsAndPassesOnTheCode) {
  const int rank = rank_of(MPI_COMM_WORLD), ranks = ranks_of(MPI_COMM_WORLD);
  Dispatcher d(MPI_COMM_WORLD);
  const std::string mine(static_cast<std::size_t>(rank) * 100000, static_cast<char>('a' + rank));
  const std::vector<std::string> all = d.gather(mine);
  if (rank == 0) {
    ASSERT_EQ(std::ssize(all), ranks);
    for (int r = 0; r < ranks; ++r)
      EXPECT_EQ(all[r],
                std::string(static_cast<std::size_t>(r) * 100000, static_cast<char>('a' + r)));
  } else {
    EXPECT_TRUE(all.empty());
  }
  EXPECT_EQ(d.conclude(rank == 0 ? 3 : 0), 3);
}

// Ranks conclude at different moments: none may take another's last message for a request.
TEST(Dispatcher, EveryEndIsOne) {
  for (int i = 0; i < 1000; ++i) {
    Dispatcher d(MPI_COMM_WORLD);
    ASSERT_EQ(d.conclude(i), i);
  }
}

TEST(Dispatcher, TheFirstMayGoToOneRankTogether) {
  const int ranks = ranks_of(MPI_COMM_WORLD);
  Dispatcher d(MPI_COMM_WORLD);
  d.open(std::vector<double>(20, 1), ranks, 5);
  std::vector<int> mine;
  for (std::int64_t i; (i = d.next()) >= 0;) mine.push_back(static_cast<int>(i));
  std::vector<int> all(20, 0), of_first(1, 0);
  for (const int i : mine) all[i] = 1;
  of_first[0] = !mine.empty() && mine.front() == 0 ? 1 : 0;
  for (int i = 0; i < 5; ++i) EXPECT_EQ(all[i], of_first[0]);
  EXPECT_EQ(granted_to_all(of_first).front(), 1);
  EXPECT_EQ(granted_to_all(all), std::vector<int>(20, 1));
  d.gather("");
  d.conclude(0);
}

TEST(Dispatcher, ARequestToStopReachesAllRanks) {
  const int rank = rank_of(MPI_COMM_WORLD), ranks = ranks_of(MPI_COMM_WORLD);
  long pid = getpid();
  MPI_Bcast(&pid, 1, MPI_LONG, 0, MPI_COMM_WORLD);
  const fs::path folder = fs::temp_directory_path() / fmt::format("weft_dispatch_{}", pid);
  if (rank == 0) fs::create_directories(folder);
  MPI_Barrier(MPI_COMM_WORLD);
  std::atomic<int> told = 0;
  {
    Dispatcher d(MPI_COMM_WORLD, std::make_unique<Requests>(folder, 0), [&] { ++told; });
    d.open(std::vector<double>(1000000, 1), ranks);
    EXPECT_GE(d.next(), 0);
    EXPECT_FALSE(d.stop_requested());
    MPI_Barrier(MPI_COMM_WORLD);
    if (rank == 0) std::ofstream(folder / "stop");
    while (d.next() >= 0) usleep(1000);
    while (!d.stop_requested())
      usleep(1000);  // rank 0 may refuse batches before its message is read
    d.gather("");
    d.conclude(0);
  }
  EXPECT_EQ(told, 1) << "on each rank, whichever was asked";
  if (rank == 0) fs::remove_all(folder);
}

TEST(Dispatcher, AnErrorThatUnwindsWaitsForNobody) {
  if (rank_of(MPI_COMM_WORLD) != 0) return;
  try {
    Dispatcher d(MPI_COMM_SELF);
    d.open({1, 1, 1}, 1);
    throw Error(Exit::hardware, "the device is gone", "");
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), Exit::hardware);
  }
}

TEST(Dispatcher, RequestsAreFewAndLeaveAShareForAll) {
  const auto granted = [](const std::vector<double>& costs, int workers) {
    std::vector<double> left(costs.size() + 1, 0);
    for (std::size_t i = costs.size(); i-- > 0;) left[i] = left[i + 1] + costs[i];
    std::vector<std::int64_t> grants;
    for (std::int64_t at = 0; at < std::ssize(costs); at += grants.back())
      grants.push_back(batches_a_request(left, at, workers));
    return grants;
  };
  const std::vector<std::int64_t> many = granted(std::vector<double>(6400, 1), 4);
  EXPECT_EQ(many.front(), 16) << "costs that are all alike may be guesses";
  EXPECT_EQ(many.back(), 1);
  EXPECT_LT(many.size(), 600u);
  EXPECT_EQ(granted(std::vector<double>(20, 1), 4), std::vector<std::int64_t>(20, 1));
  // Costly ones are not handed out together, cheap ones are.
  std::vector<double> mixed(1010, 1);
  std::fill_n(mixed.begin(), 10, 100);
  const std::vector<std::int64_t> grants = granted(mixed, 2);
  EXPECT_EQ(std::vector<std::int64_t>(grants.begin(), grants.begin() + 10),
            std::vector<std::int64_t>(10, 1));
  EXPECT_EQ(grants[10], 16);
  // Nothing is known of those at the end, or of any: they are shared all the same.
  std::vector<double> tail(40, 0);
  EXPECT_EQ(granted(tail, 8), std::vector<std::int64_t>(40, 1));
  tail.front() = 1;
  EXPECT_EQ(granted(tail, 8), std::vector<std::int64_t>(40, 1));
}

// A measurement, not a test: the share of the ranks' time that requests take, for
// WEFT_BATCHES batches that sleep WEFT_MICROSECONDS each. --gtest_also_run_disabled_tests
// --gtest_filter='*RequestRate'
TEST(Dispatcher, DISABLED_RequestRate) {
  const auto number = [](const char* name, std::int64_t otherwise) {
    const char* text = std::getenv(name);
    return text == nullptr ? otherwise : std::atoll(text);
  };
  const std::int64_t batches = number("WEFT_BATCHES", 10000);
  const auto microseconds = static_cast<useconds_t>(number("WEFT_MICROSECONDS", 0));
  const int ranks = ranks_of(MPI_COMM_WORLD);
  Dispatcher d(MPI_COMM_WORLD);
  d.open(std::vector<double>(static_cast<std::size_t>(batches), 1), ranks);
  const double begin = now_seconds();
  while (d.next() >= 0)
    if (microseconds > 0) usleep(microseconds);
  const double mine = now_seconds() - begin;
  const auto all = d.gather(fmt::format("{} {} {}", mine, d.request_seconds(), d.requests()));
  double waited = 0, seconds = 0, longest = 0;
  std::int64_t requests = 0;
  for (const std::string& text : all) {
    double own = 0, asked = 0;
    long long count = 0;
    std::sscanf(text.c_str(), "%lf %lf %lld", &own, &asked, &count);
    seconds += own;
    waited += asked;
    requests += count;
    longest = std::max(longest, own);
  }
  if (!all.empty())
    std::printf("%d ranks, %lld batches of %u us: %.3f s, %lld requests, %.2f %% of the time\n",
                ranks, static_cast<long long>(batches), microseconds, longest,
                static_cast<long long>(requests), 100 * waited / seconds);
  d.conclude(0);
}

}  // namespace
}  // namespace weft
