// The gradient buckets of a model as NCCL gets them, counted by the stand-in for CUDA.
#include <gtest/gtest.h>

#include "emulation.h"
#include "nn/parameters.h"
#include "parallel/communicator.h"
#include "tensor/device.h"

namespace weft {
namespace {

// NCCL's reduce-scatter and all-gather take equal parts only: uneven ones would be an operation for
// each rank.
TEST(Buckets, AreOneCollectiveEach) {
  int rank = 0, size = 1;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  if (visible_gpus().uuids.size() < static_cast<std::size_t>(size))
    GTEST_SKIP() << "NCCL wants a GPU for each rank";
  if (!on_cuda()) use_gpu(rank);
  const auto comm = make_nccl_communicator(MPI_COMM_WORLD, 300);
  ParameterTable table;
  for (const std::int64_t n : {10, 70001, 21, 130000, 33})
    table.add("p" + std::to_string(n), {n}, {});
  table.allocate(1 << 16, false, true, std::nullopt, comm->size());
  ASSERT_EQ(table.buckets().size(), 3u);
  const auto before = emulation::nccl_operations();
  for (int b = 0; b < 3; ++b) {
    comm->wait(comm->reduce_scatter_sum(table.gradient_of(b), CommDtype::f32));
    comm->wait(comm->all_gather(table.values_of(b)));
  }
  EXPECT_EQ(emulation::nccl_operations() - before, 6u);
}

}  // namespace
}  // namespace weft
