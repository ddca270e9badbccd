// Reduce-scatter, all-gather, all-to-all, bf16 as the communication dtype: right values at any
// length, the same bits on every rank and every time, and operations that do not fit together.

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>
#include <vector>

#include "core/error.h"
#include "core/parts.h"
#include "core/philox.h"
#include "parallel/communicator.h"
#include "tests/parallel/tensors.h"

namespace weft {
namespace {

using Ticket = Communicator::Ticket;

// Empty, smaller than a rank's unit, odd, several messages with an odd end.
const std::vector<std::int64_t> lengths = {0, 1, 15, 17, 100, 65536 + 3, 1200007};

float rounded(float x) { return float(bf16(x)); }

// What the sum must be, to the bit: f32, in the order of ranks.
std::vector<float> sum_of(std::int64_t n, int ranks, std::uint64_t stream, CommDtype comm_dtype) {
  std::vector<float> sum;
  for (int r = 0; r < ranks; ++r) {
    std::vector<float> term = values(n, r, stream);
    if (comm_dtype == CommDtype::bf16 && ranks > 1)
      std::transform(term.begin(), term.end(), term.begin(), rounded);
    if (r == 0) sum.assign(term.size(), 0.0f);
    for (std::size_t i = 0; i < term.size(); ++i) sum[i] = r == 0 ? term[i] : sum[i] + term[i];
  }
  return sum;
}

template <class T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() &&
         (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0);
}

class CollectivesTest : public testing::Test {
 protected:
  void SetUp() override {
    comm_ = make_mpi_communicator(MPI_COMM_WORLD);
    rank_ = comm_->rank();
    size_ = comm_->size();
  }
  std::vector<float> part(const std::vector<float>& v) const {
    const Part p = part_of(0, std::int64_t(v.size()), rank_, size_);
    return {v.begin() + p.begin, v.begin() + p.end};
  }
  std::unique_ptr<Communicator> comm_;
  int rank_ = 0, size_ = 1;
};

TEST_F(CollectivesTest, AllReduceToTheBit) {
  for (const std::int64_t n : lengths)
    for (const CommDtype comm_dtype : {CommDtype::f32, CommDtype::bf16}) {
      std::vector<float> v = values(n, rank_, 7), expected = sum_of(n, size_, 7, comm_dtype);
      if (comm_dtype == CommDtype::bf16 && size_ > 1)
        std::transform(expected.begin(), expected.end(), expected.begin(), rounded);
      comm_->wait(comm_->all_reduce_sum(over(v), comm_dtype));
      EXPECT_TRUE(same_bits(v, expected))
          << n << (comm_dtype == CommDtype::bf16 ? " bf16" : " f32");
    }
}

TEST_F(CollectivesTest, ReduceScatterToTheBit) {
  for (const std::int64_t n : lengths)
    for (const CommDtype comm_dtype : {CommDtype::f32, CommDtype::bf16}) {
      std::vector<float> v = values(n, rank_, 8);
      const std::vector<float> expected = part(sum_of(n, size_, 8, comm_dtype));
      comm_->wait(comm_->reduce_scatter_sum(over(v), comm_dtype));
      EXPECT_TRUE(same_bits(part(v), expected))
          << n << (comm_dtype == CommDtype::bf16 ? " bf16" : " f32");
    }
}

TEST_F(CollectivesTest, DoublesAreSummedAsDoubles) {
  for (const std::size_t n : {std::size_t{3}, std::size_t{40001}}) {
    std::vector<double> v(n), expected(n);
    for (std::size_t i = 0; i < n; ++i) {
      v[i] = 1e9 + 0.1 * rank_ + 1e-9 * static_cast<double>(i);
      for (int r = 0; r < size_; ++r) expected[i] += 1e9 + 0.1 * r + 1e-9 * static_cast<double>(i);
    }
    comm_->wait(comm_->all_reduce_sum(over(v), CommDtype::bf16));
    EXPECT_TRUE(same_bits(v, expected)) << n;
  }
}

template <class T>
void expect_gathered(Communicator& comm, std::int64_t n) {
  std::vector<T> v(n), whole(v.size());
  for (std::size_t i = 0; i < whole.size(); ++i)
    for (std::size_t b = 0; b < sizeof(T); ++b)
      reinterpret_cast<unsigned char*>(&whole[i])[b] = static_cast<unsigned char>(i * 37 + b * 11);
  const Part mine = part_of(0, n, comm.rank(), comm.size());
  std::copy(whole.begin() + mine.begin, whole.begin() + mine.end, v.begin() + mine.begin);
  comm.wait(comm.all_gather(over(v)));
  EXPECT_TRUE(same_bits(v, whole)) << n << " of " << name_of(dtype_of<T>::value);
}

TEST_F(CollectivesTest, AllGatherOfAnyTypeKeepsEveryBit) {
  for (const std::int64_t n : lengths) {
    expect_gathered<float>(*comm_, n);
    expect_gathered<bf16>(*comm_, n);
    expect_gathered<double>(*comm_, n);
    expect_gathered<std::int64_t>(*comm_, n);
    expect_gathered<std::uint8_t>(*comm_, n);
  }
}

TEST_F(CollectivesTest, AllToAllWithUnevenCounts) {
  // From rank a to rank b: some none, some many messages.
  const auto count = [&](int a, int b, std::int64_t unit) {
    return (a + 2 * b) % 3 == 0 ? std::int64_t{0} : unit * (a + 1) + b;
  };
  const auto value = [](int a, int b, std::int64_t i) {
    return static_cast<float>(a * 100 + b) + 1e-4f * static_cast<float>(i % 1000);
  };
  for (const std::int64_t unit : {std::int64_t{0}, std::int64_t{5}, std::int64_t{150001}}) {
    std::vector<std::int64_t> from_counts, to_counts;
    std::vector<float> from, expected;
    for (int r = 0; r < size_; ++r) {
      from_counts.push_back(count(rank_, r, unit));
      to_counts.push_back(count(r, rank_, unit));
      for (std::int64_t i = 0; i < from_counts.back(); ++i) from.push_back(value(rank_, r, i));
      for (std::int64_t i = 0; i < to_counts.back(); ++i) expected.push_back(value(r, rank_, i));
    }
    std::vector<float> to(expected.size(), -1.0f);
    comm_->wait(comm_->all_to_all(over(from), from_counts, over(to), to_counts));
    EXPECT_TRUE(same_bits(to, expected)) << unit;
  }
}

// Kinds and lengths mixed, most of them on their way at once; and the same bits again.
TEST_F(CollectivesTest, ManyAtOnceOfAllKinds) {
  const auto run = [&] {
    std::vector<std::vector<float>> tensors, received;
    std::vector<std::vector<double>> doubles;
    std::vector<Ticket> tickets;
    constexpr int rounds = 24;
    tensors.reserve(3 * rounds);
    received.reserve(rounds);
    doubles.reserve(rounds);
    for (int k = 0; k < rounds; ++k) {
      const std::int64_t n = 1 + 4973 * k;
      const auto stream = static_cast<std::uint64_t>(100 + k);
      tensors.push_back(values(n, rank_, stream));
      tickets.push_back(
          comm_->all_reduce_sum(over(tensors.back()), k % 2 ? CommDtype::bf16 : CommDtype::f32));
      tensors.push_back(values(n, rank_, stream));
      tickets.push_back(comm_->reduce_scatter_sum(over(tensors.back())));
      tickets.push_back(comm_->all_gather(over(tensors.back())));
      doubles.push_back({1.0 * rank_, 2.0 * k});
      tickets.push_back(comm_->all_reduce_sum(std::span<double>(doubles.back())));
      tensors.push_back(values(n * size_, rank_, stream + 1000));
      received.emplace_back(tensors.back().size());
      const std::vector<std::int64_t> counts(size_, n);
      tickets.push_back(
          comm_->all_to_all(over(tensors.back()), counts, over(received.back()), counts));
    }
    for (const Ticket t : tickets) comm_->wait(t);
    for (int k = 0; k < rounds; ++k) {
      const auto at = static_cast<std::size_t>(k);
      const std::int64_t n = 1 + 4973 * k;
      EXPECT_TRUE(same_bits(tensors[3 * at + 1],
                            sum_of(n, size_, static_cast<std::uint64_t>(100 + k), CommDtype::f32)))
          << k << ": scattered and gathered is reduced";
      EXPECT_EQ(doubles[at][0], size_ * (size_ - 1) / 2);
      for (int r = 0; r < size_; ++r) {
        const std::vector<float> sent = values(n * size_, r, static_cast<std::uint64_t>(1100 + k));
        EXPECT_EQ(received[at][r * n], sent[rank_ * n]);
      }
    }
    tensors.insert(tensors.end(), received.begin(), received.end());
    return tensors;
  };
  const auto first = run(), second = run();
  for (std::size_t i = 0; i < first.size(); ++i)
    EXPECT_TRUE(same_bits(first[i], second[i])) << i << ": another run, other bits";
}

// Two ranks that do not agree over what one sends the other learn it at once, with the numbers.
TEST_F(CollectivesTest, AnAllToAllThatDoesNotFitIsTold) {
  if (size_ == 1) GTEST_SKIP() << "one rank agrees with itself";
  const auto comm = make_mpi_communicator(MPI_COMM_WORLD, 300);
  std::vector<std::int64_t> from_counts(size_, 4);
  const std::vector<std::int64_t> to_counts = from_counts;
  // Rank 0 alone has more for the last than that one awaits.
  if (rank_ == 0) from_counts.back() = 5;
  // The other ranks' operations are abandoned: MPI may write what is under way until the program
  // ends.
  std::vector<float>& from = *new std::vector<float>(4 * size_ + (rank_ == 0 ? 1 : 0), 1.0f);
  std::vector<float>& to = *new std::vector<float>(4 * size_);
  const Ticket ticket = comm->all_to_all(over(from), from_counts, over(to), to_counts);
  if (rank_ == size_ - 1) try {
      comm->wait(ticket);
      ADD_FAILURE() << "nobody noticed";
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), Exit::hang);
      EXPECT_EQ(
          std::string(e.what()),
          fmt::format("collective 1: rank 0 sends 5 elements to rank {}, which awaits 4", rank_));
    }
  MPI_Barrier(MPI_COMM_WORLD);
}

// Two communicators over the same ranks, as data and sequence parallelism have them, both busy.
TEST(TwoCommunicators, DoNotMix) {
  const auto a = make_mpi_communicator(MPI_COMM_WORLD), b = make_mpi_communicator(MPI_COMM_WORLD);
  const float ranks = static_cast<float>(a->size());
  std::vector<std::vector<float>> in_a, in_b;
  std::vector<Ticket> of_a, of_b;
  for (int k = 0; k < 8; ++k) {
    in_a.emplace_back(std::size_t{100000}, 1.0f);
    in_b.emplace_back(std::size_t{70000}, 2.0f);
  }
  for (std::size_t k = 0; k < 8; ++k) {
    of_a.push_back(a->all_reduce_sum(over(in_a[k])));
    of_b.push_back(b->all_reduce_sum(over(in_b[k])));
  }
  for (std::size_t k = 8; k-- > 0;) {
    b->wait(of_b[k]);
    a->wait(of_a[k]);
    EXPECT_EQ(in_a[k], std::vector<float>(100000, ranks));
    EXPECT_EQ(in_b[k], std::vector<float>(70000, 2 * ranks));
  }
}

}  // namespace
}  // namespace weft
