#include "ops/layout.h"
#include "ops/pointwise.h"

#include "reference.h"

namespace weft::test {
namespace {

TEST_F(OpTest, PositionEmbeddingPutsWidthFirst) {
  // The example of docs/models/stdit3.md, Position embedding: C=8, H=2, W=3. There the ratio base/W
  // is not applied; with base = round(sqrt(6)) = 2 the coordinates are scaled so that it cancels.
  Tensor p = poisoned({6, 8});
  ops::position_embedding(2, 3, 2.0 / 3.0, p);
  const double expected[] = {0.84147098, 0.0099998333, 0.54030231, 0.99995, 0, 0, 1, 1};
  for (int i = 0; i < 8; ++i) EXPECT_NEAR(p.data<float>()[8 + i], expected[i], 1e-6) << i;
}

TEST_F(OpTest, TimestepEmbeddingIsCosineFirst) {
  Tensor e = poisoned({2, 256});
  ops::timestep_embedding(to_tensor({0, 707.4931}, {2}), e);
  for (int k = 0; k < 128; ++k) {
    EXPECT_EQ(e.data<float>()[k], 1.0f);
    EXPECT_EQ(e.data<float>()[128 + k], 0.0f);
    const double angle = 707.4931 * std::exp(-std::log(10000.0) * k / 128);
    EXPECT_NEAR(e.data<float>()[256 + k], std::cos(angle), 2e-4);
    EXPECT_NEAR(e.data<float>()[256 + 128 + k], std::sin(angle), 2e-4);
  }
}

TEST_F(OpTest, RopeTable) {
  Tensor rope = poisoned({3, 2, 2});
  ops::rope_table(to_tensor({1.0, 0.01}, {2}), rope);
  EXPECT_NEAR(rope.data<float>()[(2 * 2 + 1) * 2], std::cos(0.02), 1e-7);
  EXPECT_NEAR(rope.data<float>()[(2 * 2 + 0) * 2 + 1], std::sin(2.0), 1e-7);
}

TEST_F(OpTest, CaptionsAreGatheredWithNullRows) {
  const Vec y = random_values(2 * 3 * 20, 1), null_caption = random_values(3 * 20, 2);
  const Vec index = {0, 2, -1, -3};
  const Tensor ti = to_tensor(index, {4}, DType::i32);
  Tensor rows = poisoned({4, 20});
  ops::gather_captions(to_tensor(y, {2, 3, 20}), to_tensor(null_caption, {3, 20}), ti, rows);
  for (int i = 0; i < 20; ++i) {
    EXPECT_EQ(rows.data<float>()[20 + i], static_cast<float>(y[2 * 20 + i]));
    EXPECT_EQ(rows.data<float>()[2 * 20 + i], static_cast<float>(null_caption[i]));
    EXPECT_EQ(rows.data<float>()[3 * 20 + i], static_cast<float>(null_caption[2 * 20 + i]));
  }
  const Vec g = random_values(80, 3);
  Tensor dy = to_tensor(Vec(y.size(), 0.0), {2, 3, 20});
  ops::gather_captions_backward(to_tensor(g, {4, 20}), ti, dy);
  for (int i = 0; i < 20; ++i) {
    EXPECT_EQ(dy.data<float>()[2 * 20 + i], static_cast<float>(g[20 + i]));
    EXPECT_EQ(dy.data<float>()[20 + i], 0.0f);  // row 1 was not taken
  }
}

TEST_F(OpTest, PaddingRowsOfCaptionsAreZeroAndGiveNoGradient) {
  const Vec y = random_values(3 * 20, 1), g = random_values(60, 2);
  for (const DType dtype : {DType::f32, DType::bf16}) {
    const Tensor index = to_tensor({1, ops::padding_row, ops::padding_row}, {3}, DType::i32), none;
    Tensor rows = poisoned({3, 20}, dtype), dy = to_tensor(Vec(60, 0.0), {1, 3, 20});
    ops::gather_captions(to_tensor(y, {1, 3, 20}), none, index, rows);
    ops::gather_captions_backward(to_tensor(g, {3, 20}, dtype), index, dy);
    const Vec out = to_values(rows), gradient = to_values(dy), in = rounded(g, dtype);
    for (std::size_t i = 0; i < 60; ++i) {
      if (i >= 20) {
        EXPECT_EQ(out[i], 0.0);
      }
      EXPECT_EQ(gradient[i], i >= 20 && i < 40 ? in[i - 20] : 0.0);
    }
  }
}

}  // namespace
}  // namespace weft::test
