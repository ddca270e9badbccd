// Which GPU of a host each of its ranks takes.
#include "parallel/rank_device.h"

#include <gtest/gtest.h>

namespace weft {
namespace {

using Places = std::vector<std::size_t>;

// Ranks on these nodes, all of which see GPUs on those.
std::vector<HostRank> host(const std::vector<int>& rank_nodes, const std::vector<int>& gpu_nodes) {
  std::vector<SeenGpu> gpus;
  for (std::size_t i = 0; i < gpu_nodes.size(); ++i)
    gpus.push_back({"GPU-" + std::to_string(i), gpu_nodes[i]});
  std::vector<HostRank> ranks;
  for (const int node : rank_nodes) ranks.push_back({gpus, node});
  return ranks;
}

TEST(AssignGpus, InOrderWhereNodesAreNotKnown) {
  EXPECT_EQ(assign_gpus(host({-1, -1, -1, -1}, {-1, -1, -1, -1})), (Places{0, 1, 2, 3}));
  EXPECT_EQ(assign_gpus(host({0, 0, 1, 1}, {-1, -1, -1, -1})), (Places{0, 1, 2, 3}));
  EXPECT_EQ(assign_gpus(host({0, 0}, {0, 0})), (Places{0, 1}));
}

TEST(AssignGpus, OfTheRanksOwnNode) {
  EXPECT_EQ(assign_gpus(host({0, 0, 0, 0, 1, 1, 1, 1}, {1, 1, 0, 0, 1, 1, 0, 0})),
            (Places{2, 3, 6, 7, 0, 1, 4, 5}));
}

TEST(AssignGpus, AFarOneBeforeASharedOne) {
  EXPECT_EQ(assign_gpus(host({0, 0, 0}, {0, 1, 1})), (Places{0, 1, 2}));
  EXPECT_EQ(assign_gpus(host({0, 0, 0, 0}, {0, 1})), (Places{0, 1, 0, 1}));
}

TEST(AssignGpus, NearPairsBeforeTheOthers) {
  // Four nodes a socket: the first rank has no near GPU, and those of later ranks are not its.
  EXPECT_EQ(assign_gpus(host({0, 1, 2, 3}, {1, 3, 1, 3})), (Places{2, 0, 3, 1}));
  EXPECT_EQ(assign_gpus(host({0, 1, 2, 3, 4, 5, 6, 7}, {3, 3, 1, 1, 7, 7, 5, 5})),
            (Places{1, 2, 3, 0, 5, 6, 7, 4}));
  // The same where GPUs are shared: the rank that is left over shares its near one.
  EXPECT_EQ(assign_gpus(host({1, 1, 0}, {0, 1})), (Places{1, 1, 0}));
}

TEST(AssignGpus, RanksThatSeeDifferentOnes) {
  const SeenGpu a{"GPU-a", 0}, b{"GPU-b", 1};
  EXPECT_EQ(assign_gpus({{{a}, 1}, {{b}, 0}}), (Places{0, 0}));
  EXPECT_EQ(assign_gpus({{{b, a}, 0}, {{a, b}, 0}}), (Places{1, 1}));
  // The second rank's near GPU is the only one of the first.
  EXPECT_EQ(assign_gpus({{{a}, 1}, {{a, b}, 0}}), (Places{0, 1}));
}

}  // namespace
}  // namespace weft
