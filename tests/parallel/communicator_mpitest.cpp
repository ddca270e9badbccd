// Reductions between ranks: right sums, the same bits everywhere and every time, and progress
// without help.
#include "parallel/communicator.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <numeric>
#include <thread>
#include <vector>

#include "core/error.h"
#include "core/philox.h"
#include "tests/parallel/tensors.h"

namespace weft {
namespace {

using Ticket = Communicator::Ticket;

// The same bits on all ranks: compared through MPI, not through what is tested.
bool same_everywhere(const std::vector<float>& v) {
  std::vector<float> first = v;
  MPI_Bcast(first.data(), static_cast<int>(first.size()), MPI_FLOAT, 0, MPI_COMM_WORLD);
  int same = std::memcmp(first.data(), v.data(), v.size() * sizeof(float)) == 0, all = 0;
  MPI_Allreduce(&same, &all, 1, MPI_INT, MPI_MIN, MPI_COMM_WORLD);
  return all != 0;
}

class CommunicatorTest : public testing::Test {
 protected:
  std::unique_ptr<Communicator> comm_ = make_mpi_communicator(MPI_COMM_WORLD);
  int rank_ = comm_->rank(), size_ = comm_->size();
};

TEST_F(CommunicatorTest, KnowsItsPlace) {
  int rank = -1, size = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  EXPECT_EQ(rank_, rank);
  EXPECT_EQ(size_, size);
}

TEST_F(CommunicatorTest, SumsOfAllLengths) {
  for (const std::int64_t n :
       {std::int64_t{1}, std::int64_t{7}, std::int64_t{1} << 16, 3 * (std::int64_t{1} << 20) + 5}) {
    std::vector<double> expected(n, 0.0);
    for (int r = 0; r < size_; ++r) {
      const auto part = values(n, r, 7);
      for (std::size_t i = 0; i < part.size(); ++i) expected[i] += static_cast<double>(part[i]);
    }
    std::vector<float> sum = values(n, rank_, 7);
    EXPECT_GE(comm_->wait(comm_->all_reduce_sum(over(sum))), 0);
    // No ASSERT here: a rank that left early would hang the others in the next collective.
    double worst = 0;
    for (std::size_t i = 0; i < sum.size(); ++i)
      worst = std::max(worst, std::abs(static_cast<double>(sum[i]) - expected[i]));
    EXPECT_LE(worst, size_ * 0x1p-23) << n;
    EXPECT_TRUE(same_everywhere(sum)) << n;
    std::vector<float> again = values(n, rank_, 7);
    comm_->wait(comm_->all_reduce_sum(over(again)));
    EXPECT_EQ(again, sum) << n << ": another run, other bits";
  }
}

TEST_F(CommunicatorTest, ManyOutstandingOfMixedKind) {
  constexpr int rounds = 40;
  std::vector<std::vector<float>> tensors;
  std::vector<std::vector<double>> doubles;
  for (int k = 0; k < rounds; ++k) {
    tensors.push_back(values(1 + 977 * k, rank_, 100 + static_cast<std::uint64_t>(k)));
    doubles.push_back({1e9 + k, 0.1 * rank_, static_cast<double>(k * rank_)});
  }
  std::vector<Ticket> tickets;
  for (std::size_t k = 0; k < rounds; ++k) {
    tickets.push_back(comm_->all_reduce_sum(over(tensors[k])));
    tickets.push_back(comm_->all_reduce_sum(std::span<double>(doubles[k])));
  }
  for (const Ticket t : tickets) comm_->wait(t);
  const double ranks = size_, triangle = ranks * (ranks - 1) / 2;
  for (std::size_t k = 0; k < rounds; ++k) {
    double expected = 0;
    for (int r = 0; r < size_; ++r)
      expected +=
          static_cast<double>(values(1 + 977 * static_cast<std::int64_t>(k), r, 100 + k).back());
    EXPECT_NEAR(tensors[k].back(), expected, size_ * 0x1p-23) << k;
    EXPECT_TRUE(same_everywhere(tensors[k])) << k;
    const auto at = static_cast<double>(k);
    EXPECT_EQ(doubles[k][0], ranks * (1e9 + at)) << "doubles are summed as doubles";
    EXPECT_NEAR(doubles[k][1], 0.1 * triangle, 1e-15 * ranks);
    EXPECT_EQ(doubles[k][2], at * triangle);
  }
}

TEST_F(CommunicatorTest, WaitInAnyOrderAndTwice) {
  std::vector<std::vector<float>> tensors;
  std::vector<Ticket> tickets;
  for (int k = 0; k < 6; ++k)
    tensors.emplace_back(std::size_t{5000}, static_cast<float>(rank_ + k));
  for (auto& t : tensors) tickets.push_back(comm_->all_reduce_sum(over(t)));
  for (const int k : {3, 5, 0, 4, 1, 2, 5, 0}) {
    comm_->wait(tickets[k]);
    const float expected = static_cast<float>(size_ * (size_ - 1) / 2 + size_ * k);
    EXPECT_EQ(tensors[k], std::vector<float>(5000, expected)) << k;
  }
}

// Adds in f32 are not associative: values that cancel show any change of order.
TEST_F(CommunicatorTest, CancellingSumsHaveOneResult) {
  const auto run = [&] {
    std::vector<float> v(100003);
    for (std::size_t i = 0; i < v.size(); ++i) {
      const float big = 1e7f * static_cast<float>(1 + i % 13);
      v[i] = (rank_ % 2 == 0 ? big : -big) + 0.37f * static_cast<float>(rank_ + 1);
    }
    comm_->wait(comm_->all_reduce_sum(over(v)));
    return v;
  };
  const auto first = run();
  EXPECT_TRUE(same_everywhere(first));
  for (int k = 0; k < 5; ++k) EXPECT_EQ(run(), first);
}

// While every main thread computes and calls no MPI, the sum arrives.
TEST_F(CommunicatorTest, ProgressesWhileTheMainThreadComputes) {
  std::vector<float> v(std::size_t{1} << 18, 1.0f);
  volatile float* last = &v.back();
  const Ticket ticket = comm_->all_reduce_sum(over(v));
  const auto start = std::chrono::steady_clock::now();
  double work = 0;
  while (*last != static_cast<float>(size_) &&
         std::chrono::steady_clock::now() - start < std::chrono::seconds(60))
    for (int i = 0; i < 10000; ++i) work += 1e-9 * i;
  EXPECT_EQ(*last, static_cast<float>(size_)) << "nothing moved in a minute of " << work;
  comm_->wait(ticket);
  EXPECT_EQ(std::accumulate(v.begin(), v.end(), 0.0), static_cast<double>(v.size()) * size_);
}

// A small sum is left to wait(), and yet arrives where the caller waits for something else first.
TEST_F(CommunicatorTest, ASmallSumArrivesBeforeItsWait) {
  std::vector<float> v(10, 1.0f);
  const Ticket ticket = comm_->all_reduce_sum(over(v));
  if (rank_ == 0) comm_->wait(ticket);
  MPI_Barrier(MPI_COMM_WORLD);
  comm_->wait(ticket);
  EXPECT_EQ(v, std::vector<float>(10, static_cast<float>(size_)));
}

// A rank that comes late holds the others up, and their wait says for how long.
TEST_F(CommunicatorTest, WaitTellsHowLongItBlocked) {
  if (size_ == 1) GTEST_SKIP() << "one rank waits for nobody";
  std::vector<float> v(100, 1.0f);
  // The host may hold a rank up by itself: once in ten times it does not.
  int told = 0;
  for (int k = 0; k < 10 && told == 0; ++k) {
    MPI_Barrier(MPI_COMM_WORLD);
    if (rank_ == size_ - 1) std::this_thread::sleep_for(std::chrono::milliseconds(300));
    const Ticket ticket = comm_->all_reduce_sum(over(v));
    const double blocked = comm_->wait(ticket);
    // What is complete blocks no more.
    told = (rank_ == size_ - 1 || blocked > 0.2) && blocked < 30 && comm_->wait(ticket) < 0.1;
    MPI_Allreduce(MPI_IN_PLACE, &told, 1, MPI_INT, MPI_MIN, MPI_COMM_WORLD);
  }
  EXPECT_TRUE(told);
}

// The last rank never comes: everybody learns its name within the timeout, and so does it.
TEST_F(CommunicatorTest, ARankThatNeverComesIsNamedOnEveryRank) {
  if (size_ == 1) GTEST_SKIP() << "one rank waits for nobody";
  const int late = size_ - 1;
  std::vector<float> v(1000, 1.0f);
  const auto comm = make_mpi_communicator(MPI_COMM_WORLD, 300);
  comm->wait(comm->all_reduce_sum(over(v)));
  EXPECT_NO_THROW(comm->check());
  // The limit holds once all the others are in it.
  const Ticket hanging = rank_ != late ? comm->all_reduce_sum(over(v)) : 0;
  MPI_Barrier(MPI_COMM_WORLD);
  comm->set_timeout(1.0);
  const auto start = std::chrono::steady_clock::now();
  try {
    if (rank_ != late) comm->wait(hanging);
    while (std::chrono::steady_clock::now() - start < std::chrono::seconds(60)) {
      comm->check();
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    ADD_FAILURE() << "nobody noticed";
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), Exit::hang);
    EXPECT_NE(std::string(e.what()).find(fmt::format("late: rank {} on ", late)), std::string::npos)
        << e.what();
    EXPECT_NE(std::string(e.what()).find("all-reduce 2 (f32, 0.004 MiB) did not end within 1 s"),
              std::string::npos)
        << e.what();
    EXPECT_EQ(std::string(e.what()).find("rank 0 on"), std::string::npos) << e.what();
  }
  EXPECT_THROW(comm->all_reduce_sum(over(v)), Error) << "what has failed stays failed";
}

TEST_F(CommunicatorTest, NothingIssuedNothingToWaitFor) {
  for (int k = 0; k < 20; ++k) make_mpi_communicator(MPI_COMM_WORLD).reset();
  // Two at once keep apart: tickets of one are not answered by the other.
  const auto second = make_mpi_communicator(MPI_COMM_WORLD);
  std::vector<float> a(1000, 1.0f), b(2000, 10.0f);
  const Ticket in_first = comm_->all_reduce_sum(over(a));
  const Ticket in_second = second->all_reduce_sum(over(b));
  second->wait(in_second);
  comm_->wait(in_first);
  EXPECT_EQ(a[999], static_cast<float>(size_));
  EXPECT_EQ(b[1999], static_cast<float>(10 * size_));
}

TEST_F(CommunicatorTest, EmptyTensorsTakeTheirTurn) {
  std::vector<float> none, some(3, 1.0f);
  const Ticket first = comm_->all_reduce_sum(over(none));
  comm_->wait(comm_->all_reduce_sum(over(some)));
  comm_->wait(first);
  EXPECT_EQ(some[2], static_cast<float>(size_));
}

}  // namespace
}  // namespace weft
