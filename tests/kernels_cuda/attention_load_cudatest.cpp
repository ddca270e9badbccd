// How evenly the Hopper kernels of flash attention share their work over an H100's multiprocessors,
// by the index functions that the kernels themselves call (kernels/attention/flash_sm90_order.cuh).
#include "attention/flash_sm90_order.cuh"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <numeric>
#include <ostream>
#include <string>
#include <vector>

namespace weft::kernels {
namespace {

constexpr int multiprocessors = 132;

struct Attention {
  std::string name;
  int sequences, heads, D, rows;
  std::vector<int> lengths;  // of packed keys; none: as many keys as queries
  // Largest load of a block by the mean of all multiprocessors: forward, dk and dv, dq.
  double bounds[3];
  bool last_bias = false;  // Wan's captions
};
void PrintTo(const Attention& a, std::ostream* to) { *to << a.name; }

// What `work` says of each tile of a list, summed by block, of which the one that is done first
// takes the next tile; by the mean over all multiprocessors.
double imbalance(int total, const std::function<std::int64_t(int)>& work) {
  std::vector<std::int64_t> load(multiprocessors, 0);
  const int blocks = std::min(total, multiprocessors);
  for (int index = 0; index < total; ++index)
    *std::min_element(load.begin(), load.begin() + blocks) += work(index);
  const auto sum = std::accumulate(load.begin(), load.end(), std::int64_t{0});
  return static_cast<double>(*std::max_element(load.begin(), load.end())) * multiprocessors /
         static_cast<double>(sum);
}

// Work is counted in rows that pass under a warpgroup: a warpgroup with no row of its own
// multiplies nothing.
std::int64_t warpgroups(int first, int rows, int own) {
  return blocks_of(std::min(rows - first, own), warpgroup_rows);
}

template <bool packed>
void expect_even(const Attention& a, const FlashShape& shape) {
  const ForwardBlock block = forward_block(shape);
  const int queries = block.groups * warpgroup_rows;
  const Tiles forward = Tiles::of_rows(shape.nq, queries, shape.heads * shape.sequences);
  std::vector<int> seen(static_cast<std::size_t>(forward.total), 0);
  const double of_forward = imbalance(forward.total, [&](int index) {
    const RowTile t = row_tile(forward, shape, queries, index);
    ++seen[static_cast<std::size_t>((t.sequence * shape.heads + t.head) * forward.each +
                                    t.first / queries)];
    const int keys = shape.keys(t.sequence);
    return warpgroups(t.first, shape.nq, queries) * blocks_of(keys, block.keys) * block.keys;
  });
  // The list has every tile once.
  EXPECT_EQ(std::count(seen.begin(), seen.end(), 1), forward.total) << a.name;

  const int splits = packed ? backward_splits(shape, multiprocessors) : 1;
  const auto of_backward = [&]<bool keys>() {
    const Tiles tiles = backward_tiles(shape, keys, splits);
    std::int64_t all = 0;
    const double result = imbalance(tiles.total, [&](int index) {
      const OwnTile t = own_tile<keys, packed>(tiles, shape, splits, index);
      if (t.sequence < 0) return std::int64_t{0};
      all += std::int64_t{std::min(t.own - t.first, backward_rows)} * t.blocks;
      return warpgroups(t.first, t.own, backward_rows) * t.blocks * pass_rows;
    });
    // All pairs of an own row and a block to pass over, once.
    std::int64_t pairs = 0;
    for (int s = 0; s < shape.sequences; ++s)
      pairs += std::int64_t{keys ? shape.keys(s) : shape.nq} *
               blocks_of(keys ? shape.nq : shape.keys(s), pass_rows) * shape.heads;
    EXPECT_EQ(all, pairs) << a.name;
    return result;
  };
  const double got[3] = {of_forward, of_backward.template operator()<true>(),
                         of_backward.template operator()<false>()};
  std::printf("%-44s forward %.3f   dk, dv %.3f (%d splits)   dq %.3f\n", a.name.c_str(), got[0],
              got[1], splits, got[2]);
  for (int i = 0; i < 3; ++i) {
    EXPECT_LE(got[i], a.bounds[i]) << a.name << ", kernel " << i;
    // A bound that says nothing would hide a worse order.
    EXPECT_GT(got[i], a.bounds[i] - 0.03) << a.name << ", kernel " << i;
  }
}

std::vector<int> mixed(int clips) {
  std::vector<int> lengths;
  for (int i = 0; i < clips; ++i) lengths.push_back(18 + i * 97 % 283);
  return lengths;
}

class AttentionLoad : public testing::TestWithParam<Attention> {};

TEST_P(AttentionLoad, IsEven) {
  const Attention& a = GetParam();
  std::vector<std::int32_t> offsets{0};
  for (const int length : a.lengths) offsets.push_back(offsets.back() + length);
  const std::vector<float> bias(a.lengths.size(), 0.0f);
  FlashShape shape;
  shape.sequences = a.sequences;
  shape.heads = a.heads;
  shape.D = a.D;
  shape.nq = shape.nk = a.rows;
  if (a.lengths.empty()) return expect_even<false>(a, shape);
  shape.nk = offsets.back();
  shape.key_offsets = offsets.data();
  if (a.last_bias) shape.last_bias = bias.data();
  expect_even<true>(a, shape);
}

// STDiT3-XL/2 has 16 heads of 72, Wan2.1-1.3B 12 of 128. What is above 1 is, but for a few
// hundredths, the last round, in which not every block has a tile.
INSTANTIATE_TEST_SUITE_P(
    Shapes, AttentionLoad,
    testing::Values(
        Attention{"space, 30 frames of S 405", 30, 16, 72, 405, {}, {1.03, 1.03, 1.03}},
        Attention{"space, 15 frames of S 1590", 15, 16, 72, 1590, {}, {1.04, 1.02, 1.02}},
        Attention{"space, 5 frames of S 3600", 5, 16, 72, 3600, {}, {1.05, 1.02, 1.02}},
        Attention{"cross, 23850 queries, L 300", 1, 16, 72, 23850, {300}, {1.07, 1.05, 1.02}},
        Attention{"cross, 23850 queries, L 120", 1, 16, 72, 23850, {120}, {1.07, 1.05, 1.02}},
        Attention{"cross, 4 clips of 23850 queries, L 18 to 300",
                  4,
                  16,
                  72,
                  23850,
                  mixed(4),
                  {1.02, 1.05, 1.02}},
        Attention{"cross, 16 clips of 1024 queries, L 18 to 300",
                  16,
                  16,
                  72,
                  1024,
                  mixed(16),
                  {1.03, 1.29, 1.03}},
        Attention{"Wan, 32760 queries and keys", 1, 12, 128, 32760, {}, {1.04, 1.04, 1.04}},
        Attention{
            "Wan, 32760 queries, 513 keys", 1, 12, 128, 32760, {513}, {1.04, 1.02, 1.04}, true}));

}  // namespace
}  // namespace weft::kernels
