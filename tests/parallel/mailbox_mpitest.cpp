// The sizes of boxes. What they carry is tested by the collectives (collectives_mpitest.cpp).
#include "parallel/mpi_collectives.h"

#include <gtest/gtest.h>

#include <cstdlib>

namespace weft {
namespace {

struct Sizes {
  std::size_t room = 0, under_way = 0;
};

// With so many ranks a host.
Sizes sizes_of(const char* ranks_a_host) {
  MPI_Comm comm = MPI_COMM_NULL;
  MPI_Comm_dup(MPI_COMM_WORLD, &comm);
  setenv("WEFT_COMM_NODE_RANKS", ranks_a_host, 1);
  const std::atomic<bool> stop = false;
  Mailboxes boxes(comm, stop);
  unsetenv("WEFT_COMM_NODE_RANKS");
  const Sizes sizes{boxes.room(), boxes.room() * static_cast<std::size_t>(boxes.depth())};
  boxes.close(true);
  MPI_Comm_free(&comm);
  return sizes;
}

// Open MPI's btl_tcp_eager_limit is 64 KiB, its own header included: a longer message waits for the
// receiver's leave.
TEST(MailboxTest, MessagesToOtherHostsNeedNoLeave) {
  int ranks = 1;
  MPI_Comm_size(MPI_COMM_WORLD, &ranks);
  if (ranks == 1) GTEST_SKIP() << "no other host";
  const Sizes together = sizes_of("4"), apart = sizes_of("1");
  EXPECT_LE(apart.room + 1024, std::size_t{64} << 10);
  // Smaller boxes, but nearly as many bytes under way.
  EXPECT_GE(apart.under_way * 10, together.under_way * 9);
  EXPECT_LE(apart.under_way, together.under_way);
}

}  // namespace
}  // namespace weft
