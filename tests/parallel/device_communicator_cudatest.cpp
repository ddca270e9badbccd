// Collectives of device memory, by NCCL and through the host: right values, the order against the
// compute stream, and hangs that name who is late. Runs on GPUs, and on the stand-in for CUDA,
// where a missing event shows under some order of the streams (WEFT_EMULATION_SEED).
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <functional>
#include <thread>
#include <vector>

#include "core/error.h"
#include "core/parts.h"
#include "parallel/communicator.h"
#include "tensor/device.h"
#include "tensor/device_cuda.h"

namespace weft {
namespace {

using Ticket = Communicator::Ticket;
using Maker = std::unique_ptr<Communicator> (*)(MPI_Comm, double);

// This rank's GPU: its own where there are enough, else one that is shared.
void take_gpu() {
  if (on_cuda()) return;
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  const std::size_t gpus = visible_gpus().uuids.size();
  ASSERT_GT(gpus, 0u);
  use_gpu(static_cast<int>(static_cast<std::size_t>(rank) % gpus));
}

bool gpus_are_shared() {
  int size = 1;
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  return visible_gpus().uuids.size() < static_cast<std::size_t>(size);
}

template <class T>
Tensor on_device(const std::vector<T>& v) {
  Tensor t = Tensor::persistent({static_cast<std::int64_t>(v.size())}, dtype_of<T>::value);
  t.set(std::span<const T>(v));
  return t;
}

template <class T>
std::vector<T> on_host(const Tensor& t) {
  const Tensor h = t.to_host();
  return {h.data<T>(), h.data<T>() + h.numel()};
}

// Small whole numbers, of which sums are exact in any order.
template <class T>
std::vector<T> terms(std::size_t n, int rank, int round = 0) {
  std::vector<T> v(n);
  for (std::size_t i = 0; i < n; ++i)
    v[i] = static_cast<T>((i * 7 + static_cast<std::size_t>(rank * 13 + round)) % 31) - T(15);
  return v;
}
template <class T>
std::vector<T> sums(std::size_t n, int ranks, int round = 0) {
  std::vector<T> v(n, T(0));
  for (int r = 0; r < ranks; ++r) {
    const std::vector<T> part = terms<T>(n, r, round);
    for (std::size_t i = 0; i < n; ++i) v[i] += part[i];
  }
  return v;
}

class DeviceCommunicatorTest : public testing::TestWithParam<Maker> {
 protected:
  void SetUp() override {
    take_gpu();
    ASSERT_NE(GetParam(), nullptr) << "linked without NCCL";
    if (GetParam() != &make_mpi_communicator && gpus_are_shared())
      GTEST_SKIP() << "NCCL wants a GPU for each rank";
    comm_ = make(300);
    rank_ = comm_->rank();
    size_ = comm_->size();
  }
  std::unique_ptr<Communicator> make(double timeout) { return GetParam()(MPI_COMM_WORLD, timeout); }
  // Runs `f`, then looks until a failure is known, which must be a hang of `what` by the last rank
  // alone.
  void expect_hang_of_last_rank(Communicator& comm, const std::string& what,
                                const std::function<void()>& f) {
    const auto start = std::chrono::steady_clock::now();
    try {
      f();
      while (std::chrono::steady_clock::now() - start < std::chrono::seconds(60)) {
        comm.check();
        std::this_thread::sleep_for(std::chrono::milliseconds(10));
      }
      ADD_FAILURE() << "nobody noticed";
    } catch (const Error& e) {
      const std::string text = e.what();
      EXPECT_EQ(e.code(), Exit::hang) << text;
      EXPECT_NE(text.find(what), std::string::npos) << text;
      EXPECT_NE(text.find(fmt::format("late: rank {} on ", size_ - 1)), std::string::npos) << text;
      EXPECT_EQ(text.find("rank 0 on"), std::string::npos) << text;
    }
    EXPECT_THROW(comm.check(), Error) << "what has failed stays failed";
  }

  std::unique_ptr<Communicator> comm_;
  int rank_ = 0, size_ = 1;
};

TEST_P(DeviceCommunicatorTest, SumsOfBothTypesAndAllLengths) {
  // The longest takes three pieces of the staging buffers, the last of them odd.
  for (const std::size_t n :
       {std::size_t{1}, std::size_t{7}, std::size_t{1} << 16, 2 * (std::size_t{1} << 21) + 5}) {
    const Tensor f = on_device(terms<float>(n, rank_));
    comm_->wait(comm_->all_reduce_sum(f));
    EXPECT_EQ(on_host<float>(f), sums<float>(n, size_)) << n;
  }
  const Tensor d = on_device(std::vector<double>{1e9 + 0.5, 1.0 * rank_, 1e-9});
  comm_->wait(comm_->all_reduce_sum(d));
  const double ranks = size_;
  EXPECT_EQ(on_host<double>(d),
            (std::vector<double>{ranks * (1e9 + 0.5), ranks * (ranks - 1) / 2, ranks * 1e-9}))
      << "doubles are summed as doubles";
  EXPECT_NO_THROW(comm_->check());
}

// The sum takes what the compute stream wrote before, and what the compute stream does after the
// wait comes after it.
TEST_P(DeviceCommunicatorTest, OrderAgainstTheComputeStream) {
  DeviceRuntime& device = device_runtime();
  const std::size_t n = 3001;
  const Tensor t = Tensor::persistent({static_cast<std::int64_t>(n)}, DType::f32);
  const Tensor seen = Tensor::persistent(t.shape(), DType::f32);
  std::vector<Tensor> results;
  for (int round = 0; round < 6; ++round) {
    const Tensor fresh = on_device(terms<float>(n, rank_, round));
    device.copy(t.raw(), fresh.raw(), t.bytes(), Stream::compute);
    comm_->wait(comm_->all_reduce_sum(t));
    results.push_back(Tensor::persistent(t.shape(), DType::f32));
    device.copy(results.back().raw(), t.raw(), t.bytes(), Stream::compute);
    device.zero(t.raw(), t.bytes(), Stream::compute);
  }
  for (int round = 0; round < 6; ++round)
    EXPECT_EQ(on_host<float>(results[round]), sums<float>(n, size_, round)) << round;
}

TEST_P(DeviceCommunicatorTest, ManyOutstandingWaitedForInAnyOrder) {
  std::vector<Tensor> tensors;
  std::vector<Ticket> tickets;
  const auto length = [](int k) { return static_cast<std::size_t>(1 + 97 * k); };
  for (int k = 0; k < 12; ++k) {
    tensors.push_back(on_device(terms<float>(length(k), rank_, k)));
    tickets.push_back(comm_->all_reduce_sum(tensors.back()));
  }
  for (const int k : {3, 11, 0, 5, 3, 1, 2, 4, 6, 7, 10, 9, 8, 11}) comm_->wait(tickets[k]);
  for (int k = 0; k < 12; ++k)
    EXPECT_EQ(on_host<float>(tensors[k]), sums<float>(length(k), size_, k)) << k;
}

TEST_P(DeviceCommunicatorTest, SaysWhatItIs) {
  if (GetParam() == &make_mpi_communicator) {
    EXPECT_EQ(comm_->describe(),
              size_ == 1 ? "one rank, nothing to reduce" : "MPI, staged through the host");
  } else {
    EXPECT_EQ(comm_->describe().rfind("NCCL 2.", 0), 0u) << comm_->describe();
  }
}

// Empty, smaller than a unit, odd, equal parts, pieces with an odd end.
const std::vector<std::size_t> lengths = {0, 1, 15, 17, 64, 65536 + 3, 1200007};

// Whole numbers that bf16 holds.
TEST_P(DeviceCommunicatorTest, ReduceScatterOfAllLengthsAndWires) {
  for (const std::size_t n : lengths)
    for (const CommDtype comm_dtype : {CommDtype::f32, CommDtype::bf16}) {
      const Tensor t = on_device(terms<float>(n, rank_));
      comm_->wait(comm_->reduce_scatter_sum(t, comm_dtype));
      const Part p = part_of(0, t.numel(), rank_, size_);
      const std::vector<float> got = on_host<float>(t), expected = sums<float>(n, size_);
      EXPECT_TRUE(
          std::equal(got.begin() + p.begin, got.begin() + p.end, expected.begin() + p.begin))
          << n;
    }
}

// A sum that bf16 does not hold is rounded, on every rank alike.
TEST_P(DeviceCommunicatorTest, AllReduceInBf16) {
  for (const std::size_t n : lengths) {
    std::vector<float> mine(n), expected(n);
    for (std::size_t i = 0; i < n; ++i) {
      float sum = 0;
      for (int r = 0; r < size_; ++r) {
        const float x = 0.1f * static_cast<float>(i % 97) - 3.3f * static_cast<float>(r + 1);
        if (r == rank_) mine[i] = x;
        const float term = size_ > 1 ? float(bf16(x)) : x;
        sum = r == 0 ? term : sum + term;
      }
      expected[i] = size_ > 1 ? float(bf16(sum)) : sum;
    }
    const Tensor t = on_device(mine);
    comm_->wait(comm_->all_reduce_sum(t, CommDtype::bf16));
    EXPECT_EQ(on_host<float>(t), expected) << n;
  }
}

template <class T>
void expect_gathered(Communicator& comm, std::size_t n) {
  std::vector<T> whole(n), mine(n);
  for (std::size_t i = 0; i < n; ++i) whole[i] = static_cast<T>(static_cast<float>(i % 101));
  const Part p = part_of(0, static_cast<std::int64_t>(n), comm.rank(), comm.size());
  std::copy(whole.begin() + p.begin, whole.begin() + p.end, mine.begin() + p.begin);
  const Tensor t = on_device(mine);
  comm.wait(comm.all_gather(t));
  const std::vector<T> got = on_host<T>(t);
  for (std::size_t i = 0; i < n; ++i)
    if (static_cast<float>(got[i]) != static_cast<float>(whole[i])) {
      ADD_FAILURE() << "element " << i << " of " << n;
      break;
    }
}

TEST_P(DeviceCommunicatorTest, AllGatherOfAllLengthsAndTypes) {
  for (const std::size_t n : lengths) {
    expect_gathered<float>(*comm_, n);
    expect_gathered<bf16>(*comm_, n);
    expect_gathered<double>(*comm_, n);
    expect_gathered<std::int64_t>(*comm_, n);
  }
}

TEST_P(DeviceCommunicatorTest, AllToAllWithUnevenCounts) {
  const auto count = [](int a, int b, std::int64_t unit) {
    return (a + b) % 3 == 1 ? std::int64_t{0} : unit * (a + 1) + b;
  };
  for (const std::int64_t unit : {0, 7, 150001}) {
    std::vector<std::int64_t> from_counts, to_counts;
    std::vector<float> from, expected;
    for (int r = 0; r < size_; ++r) {
      from_counts.push_back(count(rank_, r, unit));
      to_counts.push_back(count(r, rank_, unit));
      for (std::int64_t i = 0; i < from_counts.back(); ++i)
        from.push_back(static_cast<float>(rank_ * 10 + r + i % 7));
      for (std::int64_t i = 0; i < to_counts.back(); ++i)
        expected.push_back(static_cast<float>(r * 10 + rank_ + i % 7));
    }
    const Tensor to = on_device(std::vector<float>(expected.size(), -1.0f));
    comm_->wait(comm_->all_to_all(on_device(from), from_counts, to, to_counts));
    EXPECT_EQ(on_host<float>(to), expected) << unit;
  }
}

// Odd and even ranks apart, and all of them, in turns on the same stream.
TEST_P(DeviceCommunicatorTest, SplitsWorkBesideTheWhole) {
  MPI_Comm part = MPI_COMM_NULL;
  MPI_Comm_split(MPI_COMM_WORLD, rank_ % 2, rank_, &part);
  const auto few = comm_->split(part, 300);
  MPI_Comm_free(&part);
  EXPECT_EQ(few->rank(), rank_ / 2);
  EXPECT_EQ(few->size(), (size_ + 1 - rank_ % 2) / 2);
  for (int round = 0; round < 3; ++round) {
    const Tensor all = on_device(terms<float>(3001, rank_, round));
    const Tensor some = on_device(terms<float>(3001, rank_ / 2, round));
    comm_->all_reduce_sum(all);
    few->wait(few->all_reduce_sum(some));
    comm_->wait(comm_->all_reduce_sum(some));
    EXPECT_EQ(on_host<float>(all), sums<float>(3001, size_, round));
    std::vector<float> expected(3001, 0);
    for (int r = 0; r < size_; ++r) {
      const std::vector<float> term = sums<float>(3001, (size_ + 1 - r % 2) / 2, round);
      for (std::size_t i = 0; i < term.size(); ++i) expected[i] += term[i];
    }
    EXPECT_EQ(on_host<float>(some), expected);
  }
  EXPECT_NO_THROW(few->check());
}

// The stand-in's NCCL ends the program where registered memory is freed, or a communicator ends
// before what is registered with it.
TEST_P(DeviceCommunicatorTest, ItsMemoryMayOutliveItOrNot) {
  auto comm = make(300);
  Tensor first = comm->persistent({3001}, DType::f32), second = comm->persistent({64}, DType::f32);
  EXPECT_EQ(on_host<float>(first), std::vector<float>(3001, 0.0f));
  first.set(std::span<const float>(terms<float>(3001, rank_)));
  comm->wait(comm->all_reduce_sum(first));
  EXPECT_EQ(on_host<float>(first), sums<float>(3001, size_));
  first.release();
  comm->wait(comm->all_reduce_sum(second));
  comm.reset();
  EXPECT_EQ(on_host<float>(second), std::vector<float>(64, 0.0f));
}

TEST_P(DeviceCommunicatorTest, ARankThatNeverComesToASplitIsNamed) {
  if (size_ == 1 || GetParam() == &make_mpi_communicator)
    GTEST_SKIP() << "one rank waits for nobody, and MPI has its own way";
  const auto comm = make(300);
  comm->set_timeout(1.0);
  MPI_Comm part = MPI_COMM_NULL;
  MPI_Comm_split(MPI_COMM_WORLD, rank_ % 2, rank_, &part);
  expect_hang_of_last_rank(*comm, "split 1 did not end within 1 s", [&] {
    if (rank_ < size_ - 1) comm->split(part, 300);
  });
  MPI_Comm_free(&part);
}

// Names of nodes as NCCL takes them, during its lifetime.
class NodeName {
 public:
  explicit NodeName(int node) { setenv("NCCL_HOSTID", fmt::format("node{}", node).c_str(), 1); }
  ~NodeName() { unsetenv("NCCL_HOSTID"); }
  NodeName(const NodeName&) = delete;
  NodeName& operator=(const NodeName&) = delete;
};

// Over two nodes: the sum of each in f32, rounded; those are summed in f32. With unequal numbers of
// ranks on them, and with one rank each, every rank's term is rounded.
TEST_P(DeviceCommunicatorTest, NodesSumInTwoLevelsInBf16) {
  if (GetParam() == &make_mpi_communicator || size_ == 1) GTEST_SKIP() << "NCCL's nodes";
  const auto value = [](int rank, std::size_t i) {
    return 0.1f * static_cast<float>(i % 97) - 3.3f * static_cast<float>(rank + 1);
  };
  // Neighbours on a node, and every other rank.
  for (const bool neighbours : {true, false}) {
    const auto node_of = [&](int r) { return neighbours ? r / ((size_ + 1) / 2) : r % 2; };
    const NodeName name(node_of(rank_));
    const auto comm = make(300);
    for (const std::size_t n : lengths) {
      std::vector<float> mine(n), sum(n, 0.0f);
      for (std::size_t i = 0; i < n; ++i) {
        mine[i] = value(rank_, i);
        if (size_ % 2 == 0 && size_ > 2) {
          float of_node[2] = {0, 0};
          for (int r = 0; r < size_; ++r) of_node[node_of(r)] += value(r, i);
          sum[i] = float(bf16(of_node[0])) + float(bf16(of_node[1]));
        } else {
          for (int r = 0; r < size_; ++r) sum[i] += float(bf16(value(r, i)));
        }
      }
      const Tensor parts = on_device(mine), all = on_device(mine);
      comm->wait(comm->reduce_scatter_sum(parts, CommDtype::bf16));
      comm->wait(comm->all_reduce_sum(all, CommDtype::bf16));
      const Part p = part_of(0, parts.numel(), rank_, size_);
      const std::vector<float> got = on_host<float>(parts);
      EXPECT_TRUE(std::equal(got.begin() + p.begin, got.begin() + p.end, sum.begin() + p.begin))
          << n;
      for (float& x : sum) x = float(bf16(x));
      EXPECT_EQ(on_host<float>(all), sum) << n;
    }
  }
}

TEST_P(DeviceCommunicatorTest, ARankThatNeverComesIsNamedOnEveryRank) {
  if (size_ == 1) GTEST_SKIP() << "one rank waits for nobody";
  const auto comm = make(300);
  const Tensor t = on_device(terms<float>(1000, rank_));
  comm->wait(comm->all_reduce_sum(t));
  device_runtime().synchronize();
  // The limit holds once all the others are in it. Nothing tells when their watches, which look
  // each few milliseconds, have seen them begin.
  const Ticket hanging = rank_ < size_ - 1 ? comm->all_reduce_sum(t) : 0;
  std::this_thread::sleep_for(std::chrono::milliseconds(200));
  MPI_Barrier(MPI_COMM_WORLD);
  comm->set_timeout(1.0);
  expect_hang_of_last_rank(*comm, "(f32, 0.004 MiB) did not end within 1 s", [&] {
    if (rank_ == size_ - 1) return;
    comm->wait(hanging);
    // What hangs on the GPU is ended, so that a host that waits for the GPU goes on.
    device_runtime().synchronize();
  });
}

INSTANTIATE_TEST_SUITE_P(Staged, DeviceCommunicatorTest, testing::Values(&make_mpi_communicator));
INSTANTIATE_TEST_SUITE_P(Nccl, DeviceCommunicatorTest, testing::Values(&make_nccl_communicator));

TEST(MakeCommunicator, TakesNcclWhereEveryRankHasItsOwnGpu) {
  take_gpu();
  int size = 1;
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  const auto comm = make_communicator(MPI_COMM_WORLD);
  if (size > 1 && !gpus_are_shared())
    EXPECT_EQ(comm->describe().rfind("NCCL 2.", 0), 0u) << comm->describe();
  else
    EXPECT_EQ(comm->describe(),
              size == 1 ? "one rank, nothing to reduce" : "MPI, staged through the host");
}

}  // namespace
}  // namespace weft
