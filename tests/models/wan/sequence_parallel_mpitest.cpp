// A Wan whose tokens are shared by all ranks against the same model on each rank alone. Of its
// three heads each of 3 ranks has one; 2 ranks, which do not divide them, share the queries. Tokens
// divide evenly nowhere.
#include <mpi.h>

#include <algorithm>

#include "fixture.h"

namespace weft::test {
namespace {

Vec summed_over_ranks(Vec v) {
  MPI_Allreduce(MPI_IN_PLACE, v.data(), static_cast<int>(v.size()), MPI_DOUBLE, MPI_SUM,
                MPI_COMM_WORLD);
  return v;
}

bool same_on_all_ranks(const Vec& v) {
  Vec first = v;
  MPI_Bcast(first.data(), static_cast<int>(first.size()), MPI_DOUBLE, 0, MPI_COMM_WORLD);
  int same = first == v;
  MPI_Allreduce(MPI_IN_PLACE, &same, 1, MPI_INT, MPI_MIN, MPI_COMM_WORLD);
  return same != 0;
}

class WanGroups : public testing::Test {
 protected:
  std::unique_ptr<Arena> arena_ = Arena::reserve(std::size_t{1} << 30);
  ArenaScope scope_{*arena_};
  std::unique_ptr<Communicator> world_ = make_mpi_communicator(MPI_COMM_WORLD);
};
class WanGroupsOf
    : public WanGroups,
      public testing::WithParamInterface<std::tuple<const char*, double, const char*>> {};

TEST_P(WanGroupsOf, AgreeWithOneRank) {
  WanConfig config = tiny_wan();
  config.dtype = std::get<0>(GetParam());
  config.recompute = std::get<1>(GetParam());
  config.variant = std::get<2>(GetParam());
  if (config.variant == "i2v") config.in_channels = 8, config.out_channels = 2;
  WanModel model(config);
  const WanInput in = make_wan_input(model.net, {.T = 5, .h = 10, .w = 14});  // 175 tokens
  const Vec g = random_values(in.x.numel(), 55);
  const WanModel::Outcome alone = model.run(in, g);
  model.net.set_sequence_group(world_.get());
  // A rank's tokens have timesteps of their own where frames are given.
  const WanInput of_rank = make_wan_input(model.net, {.T = 5, .h = 10, .w = 14});
  const std::size_t begin = arena_->used();
  const WanModel::Outcome shared = model.run(of_rank, g);
  EXPECT_EQ(arena_->used(), begin) << "something of the step stayed behind";

  const bool low = config.dtype == "bf16";
  EXPECT_LE(relative_error(shared.out, alone.out), low ? 4 * 0x1p-9 : 1e-6);
  EXPECT_TRUE(same_on_all_ranks(shared.out)) << "ranks would compute different losses";
  double longest = 0;
  for (const auto& [name, gradient] : alone.gradients)
    longest = std::max(longest, std::sqrt(dot(gradient, gradient)));
  ASSERT_EQ(shared.gradients.size(), alone.gradients.size());
  for (std::size_t i = 0; i < alone.gradients.size(); ++i) {
    const auto& [name, expected] = alone.gradients[i];
    const Vec sum = summed_over_ranks(shared.gradients[i].second);
    const double length = std::sqrt(dot(expected, expected));
    const double error = relative_error(sum, expected) * (length > 0 ? length : 1);
    EXPECT_LE(error / std::max(length, 1e-3 * longest), low ? 8 * 0x1p-9 : 1e-5)
        << name << " of length " << length;
  }
}

INSTANTIATE_TEST_SUITE_P(Formats, WanGroupsOf,
                         testing::Values(std::tuple("f32", 0.0, "t2v"),
                                         std::tuple("f32", 0.5, "t2v"),
                                         std::tuple("bf16", 0.0, "t2v"),
                                         std::tuple("f32", 0.5, "ti2v"),
                                         std::tuple("f32", 0.0, "i2v")),
                         [](const auto& one) {
                           return std::string(std::get<0>(one.param)) +
                                  (std::get<1>(one.param) > 0 ? "_recomputed_" : "_") +
                                  std::get<2>(one.param);
                         });

TEST_F(WanGroups, PlannedPeakIsTheRealPeak) {
  WanModel model(tiny_wan());
  model.net.set_sequence_group(world_.get());
  const WanBatch batch{.T = 3, .h = 8, .w = 8};
  const auto planning = Arena::planning(), real = Arena::reserve(std::size_t{1} << 28);
  EXPECT_EQ(peak_of_wan_step(*planning, model, batch), peak_of_wan_step(*real, model, batch));
}

}  // namespace
}  // namespace weft::test
