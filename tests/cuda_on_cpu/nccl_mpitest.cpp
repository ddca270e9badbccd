// NCCL's operations over MPI at any number of ranks.
#include "nccl.h"

#include <mpi.h>

#include <cstdlib>
#include <memory>
#include <string>

#include "cuda_bf16.h"
#include "test_support.h"

namespace stand_in_test {
namespace {

// All ranks have one GPU: as hosts of their own NCCL takes them.
struct Comm {
  int rank = 0, size = 1;
  ncclComm_t comm = nullptr;

  Comm() {
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    setenv("NCCL_HOSTID", std::to_string(rank).c_str(), 1);
    ncclUniqueId id{};
    if (rank == 0) {
      EXPECT_EQ(ncclGetUniqueId(&id), ncclSuccess);
    }
    MPI_Bcast(&id, sizeof id, MPI_BYTE, 0, MPI_COMM_WORLD);
    EXPECT_EQ(ncclCommInitRank(&comm, size, id, rank), ncclSuccess);
    // Ranks need not agree on an order among streams.
    emulation::set_seed(static_cast<unsigned long long>(rank) + 1);
  }
  ~Comm() { EXPECT_EQ(ncclCommDestroy(comm), ncclSuccess); }
  Comm(const Comm&) = delete;
  Comm& operator=(const Comm&) = delete;
};

TEST(Nccl, Collectives) {
  const Comm c;
  const Stream stream;
  const auto n = static_cast<std::size_t>(c.size);
  const float mine = static_cast<float>(c.rank + 1),
              total = static_cast<float>(c.size * (c.size + 1) / 2);
  const Array<float> x(std::vector<float>(2 * n, mine)), sum(2 * n), part(2), gathered(2 * n);
  const Array<double> wide(std::vector<double>(5, 0.5));
  const Array<__nv_bfloat16> narrow(std::vector<__nv_bfloat16>(3, __float2bfloat16_rn(0.25f)));
  EXPECT_EQ(ncclAllReduce(x.get(), sum.get(), 2 * n, ncclFloat32, ncclSum, c.comm, stream),
            ncclSuccess);
  EXPECT_EQ(ncclAllReduce(wide.get(), wide.get(), 5, ncclFloat64, ncclSum, c.comm, stream),
            ncclSuccess);
  EXPECT_EQ(ncclAllReduce(narrow.get(), narrow.get(), 3, ncclBfloat16, ncclAvg, c.comm, stream),
            ncclSuccess);
  EXPECT_EQ(ncclReduceScatter(x.get(), part.get(), 2, ncclFloat32, ncclSum, c.comm, stream),
            ncclSuccess);
  EXPECT_EQ(ncclAllGather(x.get(), gathered.get(), 2, ncclFloat32, c.comm, stream), ncclSuccess);
  EXPECT_EQ(ncclBroadcast(x.get(), x.get(), 2 * n, ncclFloat32, c.size - 1, c.comm, stream),
            ncclSuccess);
  EXPECT_EQ(sum.read(), std::vector<float>(2 * n, total));
  EXPECT_EQ(wide.read(), std::vector<double>(5, 0.5 * c.size));
  EXPECT_EQ(static_cast<float>(narrow.read()[2]), 0.25f);
  EXPECT_EQ(part.read(), std::vector<float>(2, total));
  const std::vector<float> all = gathered.read();
  for (std::size_t i = 0; i < all.size(); ++i) EXPECT_EQ(all[i], static_cast<float>(i / 2 + 1));
  EXPECT_EQ(x.read()[0], static_cast<float>(c.size));
}

// As weft calls them: a rank's part lies in the whole.
TEST(Nccl, InPlace) {
  const Comm c;
  const Stream stream;
  const auto n = static_cast<std::size_t>(c.size), mine = static_cast<std::size_t>(c.rank);
  std::vector<float> values(2 * n), terms(2 * n);
  for (std::size_t i = 0; i < 2 * n; ++i) {
    values[i] = static_cast<float>(i / 2 == mine ? 10 * mine + i % 2 : 99);
    terms[i] = static_cast<float>(i + 100 * mine);
  }
  const Array<float> gathered(values), summed(terms);
  EXPECT_EQ(
      ncclAllGather(gathered.get() + 2 * mine, gathered.get(), 2, ncclFloat32, c.comm, stream),
      ncclSuccess);
  EXPECT_EQ(ncclReduceScatter(summed.get(), summed.get() + 2 * mine, 2, ncclFloat32, ncclSum,
                              c.comm, stream),
            ncclSuccess);
  const std::vector<float> all = gathered.read(), sums = summed.read();
  for (std::size_t i = 0; i < 2 * n; ++i)
    EXPECT_EQ(all[i], static_cast<float>(10 * (i / 2) + i % 2));
  for (std::size_t i = 2 * mine; i < 2 * mine + 2; ++i)
    EXPECT_EQ(sums[i], static_cast<float>(n * i + 100 * (n * (n - 1) / 2)));
}

// Rank r sends s + 1 numbers to rank s, all in one group.
TEST(Nccl, AllToAll) {
  const Comm c;
  const Stream stream;
  const auto n = static_cast<std::size_t>(c.size), mine = static_cast<std::size_t>(c.rank);
  std::vector<int> values;
  for (std::size_t s = 0; s < n; ++s) values.insert(values.end(), s + 1, c.rank);
  const Array<int> out(values), in(n * (mine + 1));
  EXPECT_EQ(ncclGroupStart(), ncclSuccess);
  for (std::size_t s = 0, at = 0; s < n; at += ++s) {
    EXPECT_EQ(ncclSend(out.get() + at, s + 1, ncclInt32, static_cast<int>(s), c.comm, stream),
              ncclSuccess);
    EXPECT_EQ(ncclRecv(in.get() + s * (mine + 1), mine + 1, ncclInt32, static_cast<int>(s), c.comm,
                       stream),
              ncclSuccess);
  }
  EXPECT_EQ(ncclGroupEnd(), ncclSuccess);
  const std::vector<int> got = in.read();
  for (std::size_t i = 0; i < got.size(); ++i) EXPECT_EQ(got[i], static_cast<int>(i / (mine + 1)));
}

TEST(Nccl, TwoCommunicatorsOnOneStream) {
  const Comm first, second;
  const Stream stream;
  const Array<float> x(std::vector<float>(3, 1.0f));
  for (const Comm* c : {&first, &second, &second, &first})
    EXPECT_EQ(ncclAllReduce(x.get(), x.get(), 3, ncclFloat32, ncclSum, c->comm, stream),
              ncclSuccess);
  const auto n = static_cast<float>(first.size);
  EXPECT_EQ(x.read(), std::vector<float>(3, n * n * n * n));
}

TEST(Nccl, RefusesRanksOfOneHostOnOneGpu) {
  const Comm c;
  setenv("NCCL_HOSTID", "one", 1);
  ncclUniqueId id{};
  if (c.rank == 0) {
    EXPECT_EQ(ncclGetUniqueId(&id), ncclSuccess);
  }
  MPI_Bcast(&id, sizeof id, MPI_BYTE, 0, MPI_COMM_WORLD);
  ncclComm_t refused = nullptr;
  EXPECT_EQ(ncclCommInitRank(&refused, c.size, id, c.rank), ncclInvalidUsage);
  EXPECT_NE(std::string(ncclGetLastError(nullptr)).find("Duplicate GPU"), std::string::npos);
}

TEST(Nccl, StreamsInAnyOrderDoNotDeadlock) {
  const Comm first, second;
  const Stream a, b;
  std::vector<std::unique_ptr<Array<float>>> arrays;
  for (int i = 0; i < 8; ++i) {
    arrays.push_back(std::make_unique<Array<float>>(std::vector<float>(3, static_cast<float>(i))));
    EXPECT_EQ(ncclAllReduce(arrays.back()->get(), arrays.back()->get(), 3, ncclFloat32, ncclSum,
                            i % 3 == 0 ? first.comm : second.comm, i % 2 == 0 ? a : b),
              ncclSuccess);
  }
  for (int i = 0; i < 8; ++i) EXPECT_EQ(arrays[i]->read()[0], static_cast<float>(i * first.size));
}

TEST(Nccl, GroupOfSendsAndReceives) {
  const Comm c;
  const Stream stream;
  const Array<int> out(std::vector<int>{c.rank}), in(1);
  EXPECT_EQ(ncclGroupStart(), ncclSuccess);
  EXPECT_EQ(ncclSend(out.get(), 1, ncclInt32, (c.rank + 1) % c.size, c.comm, stream), ncclSuccess);
  EXPECT_EQ(ncclRecv(in.get(), 1, ncclInt32, (c.rank + c.size - 1) % c.size, c.comm, stream),
            ncclSuccess);
  EXPECT_EQ(ncclGroupEnd(), ncclSuccess);
  EXPECT_EQ(in.read()[0], (c.rank + c.size - 1) % c.size);
}

TEST(Nccl, InAGraph) {
  const Comm c;
  const Stream stream;
  const Array<float> x(std::vector<float>(4, 1.0f));
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t exec = nullptr;
  EXPECT_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  EXPECT_EQ(ncclAllReduce(x.get(), x.get(), 4, ncclFloat32, ncclSum, c.comm, stream), ncclSuccess);
  EXPECT_EQ(ncclAllReduce(x.get(), x.get(), 4, ncclFloat32, ncclSum, c.comm, stream), ncclSuccess);
  EXPECT_CUDA(cudaStreamEndCapture(stream, &graph));
  EXPECT_CUDA(cudaGraphInstantiate(&exec, graph, 0));
  EXPECT_CUDA(cudaGraphLaunch(exec, stream));
  EXPECT_CUDA(cudaGraphLaunch(exec, stream));
  const auto n = static_cast<float>(c.size);
  EXPECT_EQ(x.read(), std::vector<float>(4, n * n * n * n));
  EXPECT_CUDA(cudaGraphExecDestroy(exec));
  EXPECT_CUDA(cudaGraphDestroy(graph));
}

TEST(Nccl, SplitsByColorInOrderOfKeys) {
  const Comm c;
  const Stream stream;
  // Odd ranks and even ones, backwards.
  ncclComm_t part = nullptr;
  EXPECT_EQ(ncclCommSplit(c.comm, c.rank % 2, -c.rank, &part, nullptr), ncclSuccess);
  int size = 0, rank = 0, behind = 0, in_all = 0;
  float wanted = 0;
  for (int r = 0; r < c.size; ++r) {
    if (r % 2 != c.rank % 2) continue;
    ++in_all;
    behind += r > c.rank;
    wanted += static_cast<float>(r);
  }
  EXPECT_EQ(ncclCommCount(part, &size), ncclSuccess);
  EXPECT_EQ(ncclCommUserRank(part, &rank), ncclSuccess);
  EXPECT_EQ(size, in_all);
  EXPECT_EQ(rank, behind);
  const Array<float> x(std::vector<float>(1, static_cast<float>(c.rank))), y(1);
  EXPECT_EQ(ncclAllReduce(x.get(), y.get(), 1, ncclFloat32, ncclSum, part, stream), ncclSuccess);
  EXPECT_EQ(ncclAllReduce(x.get(), x.get(), 1, ncclFloat32, ncclSum, c.comm, stream), ncclSuccess);
  EXPECT_EQ(y.read()[0], wanted);
  EXPECT_EQ(x.read()[0], static_cast<float>(c.size * (c.size - 1) / 2));
  EXPECT_EQ(ncclCommDestroy(part), ncclSuccess);
}

TEST(Nccl, RegistersItsOwnMemoryOnce) {
  const Comm c;
  void *p = nullptr, *handle = nullptr;
  EXPECT_EQ(ncclMemAlloc(&p, 1000), ncclSuccess);
  EXPECT_EQ(ncclCommRegister(c.comm, p, 1001, &handle), ncclInvalidArgument);
  EXPECT_EQ(ncclCommRegister(c.comm, p, 1000, &handle), ncclSuccess);
  EXPECT_EQ(ncclCommDeregister(c.comm, handle), ncclSuccess);
  EXPECT_EQ(ncclCommDeregister(c.comm, handle), ncclInvalidArgument);
  const Array<char> other(10);
  EXPECT_EQ(ncclCommRegister(c.comm, other.get(), 10, &handle), ncclInvalidArgument);
  EXPECT_EQ(ncclMemFree(p), ncclSuccess);
}

TEST(Nccl, RefusesHostMemory) {
  const Comm c;
  const Stream stream;
  float x = 1;
  EXPECT_EQ(ncclAllReduce(&x, &x, 1, ncclFloat32, ncclSum, c.comm, stream), ncclInvalidArgument);
}

TEST(Nccl, AbortEndsWhatWaits) {
  const Comm c;
  const Stream stream;
  const Array<float> x(std::vector<float>(1, 1.0f));
  ncclUniqueId id{};
  if (c.rank == 0) {
    EXPECT_EQ(ncclGetUniqueId(&id), ncclSuccess);
  }
  MPI_Bcast(&id, sizeof id, MPI_BYTE, 0, MPI_COMM_WORLD);
  ncclComm_t broken = nullptr;
  EXPECT_EQ(ncclCommInitRank(&broken, c.size, id, c.rank), ncclSuccess);
  // The last rank never joins the operation.
  if (c.size == 1 || c.rank < c.size - 1) {
    EXPECT_EQ(ncclAllReduce(x.get(), x.get(), 1, ncclFloat32, ncclSum, broken, stream),
              ncclSuccess);
  }
  EXPECT_EQ(ncclCommAbort(broken), ncclSuccess);
  EXPECT_CUDA(cudaDeviceSynchronize());
}

}  // namespace
}  // namespace stand_in_test
