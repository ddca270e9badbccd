// Runs GoogleTest under mpirun: every rank runs every test, and only rank 0 prints unless another
// fails.
#include <gtest/gtest.h>
#include <mpi.h>

#include <cstdlib>

#include "core/log.h"

int main(int argc, char** argv) {
  // Ranks of tests answer always, but not in half a second where the host holds them up.
  setenv("WEFT_COMM_GRACE", "30", 0);
  int provided = 0;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &provided);
  int rank = 0, size = 1;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  weft::log::set_rank(rank, size);
  testing::InitGoogleTest(&argc, argv);
  if (rank != 0) {
    auto& listeners = testing::UnitTest::GetInstance()->listeners();
    delete listeners.Release(listeners.default_result_printer());
  }
  int failed = RUN_ALL_TESTS();
  int any = 0;
  MPI_Allreduce(&failed, &any, 1, MPI_INT, MPI_MAX, MPI_COMM_WORLD);
  if (failed != 0 && rank != 0) std::fprintf(stderr, "rank %d failed\n", rank);
  MPI_Finalize();
  return any;
}
