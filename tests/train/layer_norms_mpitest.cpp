// Norms of the gradient by layer, each rank's parts joined, against fp64 over the whole gradient.
#include "train/layer_norms.h"

#include <gtest/gtest.h>
#include <mpi.h>

#include <cmath>
#include <map>

namespace weft {
namespace {

TEST(LayerNorms, LayersByName) {
  EXPECT_EQ(layer_of("spatial_blocks.3.attn.qkv.weight"), "spatial_blocks.3");
  EXPECT_EQ(layer_of("y_embedder.y_proj.fc1.bias"), "y_embedder.y_proj.fc1");
  EXPECT_EQ(layer_of("module.encoder.conv_blocks.0.1.weight"), "module.encoder.conv_blocks.0");
  EXPECT_EQ(layer_of("t_block.1.weight"), "t_block.1");
  EXPECT_EQ(layer_of("scale"), "scale");
}

TEST(LayerNorms, AreThoseOfTheWholeGradientOnAnyNumberOfRanks) {
  int rank = 0, ranks = 1;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &ranks);
  const auto comm = make_communicator(MPI_COMM_WORLD);
  for (const bool sharded : {false, true}) {
    ParameterTable table;
    table.add("stem.weight", {7, 3}, {});
    for (const char* block : {"blocks.0.", "blocks.1.", "blocks.10."}) {
      table.add(std::string(block) + "fc.weight", {301, 211}, {});
      table.add(std::string(block) + "fc.bias", {301}, {});
      table.add(std::string(block) + "table", {5}, {}, false);  // not trained
    }
    table.add("head.bias", {1}, {}).group = 1;
    for (const auto& p : table.all()) p->bf16_only = p->name.ends_with("fc.weight");
    table.allocate(100'000, true, true);
    std::map<std::string, double> want;
    std::int64_t number = 0;
    for (const auto& p : table.all())
      for (std::int64_t i = 0; p->trainable && i < p->shape.numel(); ++i) {
        const auto g = static_cast<float>(std::sin(static_cast<double>(++number)));
        p->grad.data<float>()[i] = g;
        want[layer_of(p->name)] += static_cast<double>(g) * g;
      }
    const OptimizerState state(table, sharded, rank, ranks);
    LayerNorms norms(table, state, *comm);
    const std::vector<std::string> layers = {"stem", "blocks.0", "blocks.1", "blocks.10", "head"};
    EXPECT_EQ(norms.layers(), layers);
    for (int again = 0; again < 2; ++again) {  // nothing is left of the call before
      comm->wait(norms.send());
      const auto squares = norms.fetch();
      ASSERT_EQ(squares.size(), layers.size());
      for (std::size_t l = 0; l < layers.size(); ++l)
        EXPECT_NEAR(squares[l], want[layers[l]], 1e-5 * want[layers[l]])
            << layers[l] << (sharded ? " sharded" : "");
    }
  }
}

}  // namespace
}  // namespace weft
