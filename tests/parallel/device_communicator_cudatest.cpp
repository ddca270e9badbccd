// Reductions of device memory, by NCCL and through the host: right sums, the order against the compute stream, operations
// inside a graph, and hangs that name who is late. Runs on GPUs, and on the stand-in for CUDA, where a missing event
// shows under some order of the streams (WEFT_EMULATION_SEED).
#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <functional>
#include <thread>
#include <vector>

#include "core/device.h"
#include "core/error.h"
#include "parallel/communicator.h"

namespace weft {
namespace {

using Ticket = Communicator::Ticket;
using Maker = std::unique_ptr<Communicator> (*)(MPI_Comm, double);

// This rank's GPU: its own where there are enough, else one that is shared.
void take_gpu() {
  if (on_cuda()) return;
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  const std::size_t gpus = visible_gpus().size();
  ASSERT_GT(gpus, 0u);
  use_gpu(static_cast<int>(static_cast<std::size_t>(rank) % gpus));
}

bool gpus_are_shared() {
  int size = 1;
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  return visible_gpus().size() < static_cast<std::size_t>(size);
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
  // Runs `f`, then looks until a failure is known, which must be a hang of `what` by the last rank alone.
  void expect_hang_of_last_rank(Communicator& comm, const std::string& what,
                                const std::function<void()>& f) {
    const auto start = std::chrono::steady_clock::now();
    try {
      f();
      while (std::chrono::steady_clock::now() - start < std::chrono::seconds(30)) {
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
    EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(20));
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

// The sum takes what the compute stream wrote before, and what the compute stream does after the wait comes after it.
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
    EXPECT_EQ(on_host<float>(results[static_cast<std::size_t>(round)]),
              sums<float>(n, size_, round))
        << round;
}

TEST_P(DeviceCommunicatorTest, ManyOutstandingWaitedForInAnyOrder) {
  std::vector<Tensor> tensors;
  std::vector<Ticket> tickets;
  const auto length = [](int k) { return static_cast<std::size_t>(1 + 97 * k); };
  for (int k = 0; k < 12; ++k) {
    tensors.push_back(on_device(terms<float>(length(k), rank_, k)));
    tickets.push_back(comm_->all_reduce_sum(tensors.back()));
  }
  for (const int k : {3, 11, 0, 5, 3, 1, 2, 4, 6, 7, 10, 9, 8, 11})
    comm_->wait(tickets[static_cast<std::size_t>(k)]);
  for (int k = 0; k < 12; ++k)
    EXPECT_EQ(on_host<float>(tensors[static_cast<std::size_t>(k)]),
              sums<float>(length(k), size_, k))
        << k;
}

TEST_P(DeviceCommunicatorTest, SaysWhatItIs) {
  if (GetParam() == &make_mpi_communicator) {
    EXPECT_EQ(comm_->describe(),
              size_ == 1 ? "one rank, nothing to reduce" : "MPI, staged through the host");
    EXPECT_EQ(comm_->capturable(), size_ == 1);
  } else {
    EXPECT_EQ(comm_->describe().rfind("NCCL 2.", 0), 0u) << comm_->describe();
    EXPECT_TRUE(comm_->capturable());
  }
}

TEST_P(DeviceCommunicatorTest, CountsTheSecondsOfItsOperations) {
  if (size_ == 1 && GetParam() == &make_mpi_communicator) GTEST_SKIP() << "one rank does nothing";
  const Tensor t = on_device(terms<float>(1 << 20, rank_));
  const double before = comm_->busy_seconds();
  comm_->wait(comm_->all_reduce_sum(t));
  device_runtime().synchronize();
  // The watchdog notices the end a little later.
  for (int i = 0; i < 500 && comm_->busy_seconds() == before; ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  EXPECT_GT(comm_->busy_seconds(), before);
  EXPECT_LT(comm_->busy_seconds(), before + 60);
}

// A recorded step with two sums between work of the compute stream, run three times.
TEST_P(DeviceCommunicatorTest, RunsInsideAGraph) {
  if (!comm_->capturable()) GTEST_SKIP() << "the host takes part in every operation";
  DeviceRuntime& device = device_runtime();
  const std::size_t n = 1003;
  const Tensor fresh = on_device(terms<float>(n, rank_));
  const Tensor a = Tensor::persistent(fresh.shape(), DType::f32);
  const Tensor b = Tensor::persistent(fresh.shape(), DType::f32);
  const Tensor warm = on_device(terms<float>(n, rank_));
  comm_->wait(comm_->all_reduce_sum(warm));  // connections are made outside
  device.begin_capture();
  device.copy(a.raw(), fresh.raw(), a.bytes(), Stream::compute);
  const Ticket first = comm_->all_reduce_sum(a);
  device.zero(b.raw(), b.bytes(), Stream::compute);
  comm_->wait(first);
  device.copy(b.raw(), a.raw(), a.bytes(), Stream::compute);
  comm_->wait(comm_->all_reduce_sum(b));
  const DeviceGraph graph = device.end_capture();
  std::vector<float> expected = sums<float>(n, size_);
  for (float& x : expected) x *= static_cast<float>(size_);
  for (int step = 0; step < 3; ++step) {
    device.zero(a.raw(), a.bytes(), Stream::compute);
    device.launch(graph);
    comm_->replayed();
    const Tensor after = on_device(std::vector<float>{1.0f});
    comm_->wait(comm_->all_reduce_sum(after));
    EXPECT_EQ(on_host<float>(after), std::vector<float>{static_cast<float>(size_)});
    EXPECT_EQ(on_host<float>(b), expected) << step;
  }
  EXPECT_NO_THROW(comm_->check());
}

TEST_P(DeviceCommunicatorTest, ARankThatNeverComesIsNamedOnEveryRank) {
  if (size_ == 1) GTEST_SKIP() << "one rank waits for nobody";
  const auto comm = make(1.0);
  const Tensor t = on_device(terms<float>(1000, rank_));
  comm->wait(comm->all_reduce_sum(t));
  device_runtime().synchronize();
  expect_hang_of_last_rank(*comm, "(f32, 0.004 MiB) did not end within 1 s", [&] {
    if (rank_ == size_ - 1) return;
    comm->wait(comm->all_reduce_sum(t));
    // What hangs on the GPU is ended, so that a host that waits for the GPU goes on.
    device_runtime().synchronize();
  });
}

TEST_P(DeviceCommunicatorTest, ARankThatDoesNotRunItsGraphIsNamed) {
  if (size_ == 1 || !comm_->capturable()) GTEST_SKIP() << "nobody to wait for, or no graphs";
  const auto comm = make(1.0);
  DeviceRuntime& device = device_runtime();
  const Tensor t = on_device(terms<float>(1000, rank_));
  comm->wait(comm->all_reduce_sum(t));
  device.begin_capture();
  comm->wait(comm->all_reduce_sum(t));
  const DeviceGraph graph = device.end_capture();
  device.launch(graph);
  comm->replayed();
  device.synchronize();
  expect_hang_of_last_rank(*comm, "the work of step 2 with its all-reduces", [&] {
    if (rank_ == size_ - 1) return;
    device.launch(graph);
    comm->replayed();
    device.synchronize();
  });
}

// One rank records its work in the step in which another replays it, with sums between the graphs as training has them:
// counts agree, and a later hang names nobody wrongly.
TEST_P(DeviceCommunicatorTest, RanksMayRecordInDifferentSteps) {
  if (size_ == 1) GTEST_SKIP() << "nobody to differ from";
  const auto comm = make(1.0);
  DeviceRuntime& device = device_runtime();
  const Tensor t = on_device(terms<float>(100, rank_));
  const Tensor fresh = on_device(terms<float>(100, rank_));
  const auto work = [&] { device.copy(t.raw(), fresh.raw(), t.bytes(), Stream::compute); };
  DeviceGraph graph;
  for (int step = 0; step < 3; ++step) {
    if (step == rank_) {
      device.begin_capture();
      work();
      graph = device.end_capture();
    }
    for (int k = 0; k < 3; ++k) {
      if (graph)
        device.launch(graph);
      else
        work();
      comm->wait(comm->all_reduce_sum(t));
      EXPECT_EQ(on_host<float>(t), sums<float>(100, size_));
    }
    comm->replayed();
  }
  device.synchronize();
  expect_hang_of_last_rank(*comm, "did not end within 1 s", [&] {
    if (rank_ == size_ - 1) return;
    comm->wait(comm->all_reduce_sum(t));
    device.synchronize();
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
