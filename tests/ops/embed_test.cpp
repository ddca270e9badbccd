#include "ops/embed.h"
#include "ops/layout.h"
#include "ops/pointwise.h"

#include "reference.h"

namespace weft::test {
namespace {

TEST_F(OpTest, PatchifyGathersAndPadsAndItsBackwardIsTheTranspose) {
  // 3x5 pixels in 2x2 patches: the last row and column are padded with zeros.
  const Shape x_shape{2, 3, 2, 3, 5}, row_shape{2, 2, 2 * 3, 3 * 2 * 2};
  const ops::PatchGeometry patch{1, 2, 2};
  const Vec x = random_values(x_shape.numel(), 1), g = random_values(row_shape.numel(), 2);
  Tensor rows = poisoned(row_shape);
  ops::patchify_forward(to_tensor(x, x_shape), patch, rows);
  const auto at = [&](int b, int c, int t, int h, int w) {
    return h < 3 && w < 5 ? x[(((b * 3 + c) * 2 + t) * 3 + h) * 5 + w] : 0.0;
  };
  for (int b = 0; b < 2; ++b)
    for (int t = 0; t < 2; ++t)
      for (int h = 0; h < 2; ++h)
        for (int w = 0; w < 3; ++w)
          for (int e = 0; e < 12; ++e)  // (c, ph, pw)
            ASSERT_EQ(rows.data<float>()[(((b * 2 + t) * 2 + h) * 3 + w) * 12 + e],
                      static_cast<float>(at(b, e / 4, t, 2 * h + e % 4 / 2, 2 * w + e % 2)));
  Tensor dx = poisoned(x_shape);
  ops::patchify_backward(to_tensor(g, row_shape), patch, dx);
  EXPECT_NEAR(dot(to_values(rows), g), dot(x, to_values(dx)), 1e-4);
}

TEST_F(OpTest, UnpatchifyOrderCropAndTranspose) {
  const Shape out_shape{2, 3, 2, 3, 5}, row_shape{2, 2, 2 * 3, 2 * 2 * 3};
  const ops::PatchGeometry patch{1, 2, 2};
  const Vec rows = random_values(row_shape.numel(), 1), g = random_values(out_shape.numel(), 2);
  Tensor out = poisoned(out_shape);
  ops::unpatchify_forward(to_tensor(rows, row_shape), patch, out);
  for (int b = 0; b < 2; ++b)
    for (int c = 0; c < 3; ++c)
      for (int t = 0; t < 2; ++t)
        for (int h = 0; h < 3; ++h)
          for (int w = 0; w < 5; ++w) {  // element (ph, pw, c), c fastest
            const int row = ((b * 2 + t) * 2 + h / 2) * 3 + w / 2, e = (h % 2 * 2 + w % 2) * 3 + c;
            ASSERT_EQ(out.data<float>()[(((b * 3 + c) * 2 + t) * 3 + h) * 5 + w],
                      static_cast<float>(rows[row * 12 + e]));
          }
  Tensor drows = poisoned(row_shape);
  ops::unpatchify_backward(to_tensor(g, out_shape), patch, drows);
  EXPECT_NEAR(dot(to_values(out), g), dot(rows, to_values(drows)), 1e-4);
}

TEST_F(OpTest, PositionEmbeddingPutsWidthFirst) {
  // The example of specs/stdit3.md 4: C=8, H=2, W=3. There the ratio base/W is not applied; with base = round(sqrt(6))
  // = 2 the coordinates are scaled so that it cancels.
  Tensor p = poisoned({6, 8});
  ops::position_embedding(2, 3, 2.0 / 3.0, p);
  const double expected[] = {0.84147098, 0.0099998333, 0.54030231, 0.99995, 0, 0, 1, 1};
  for (int i = 0; i < 8; ++i) EXPECT_NEAR(p.data<float>()[8 + i], expected[i], 1e-6) << i;
}

TEST_F(OpTest, AddPositionBroadcastsOverFrames) {
  const Vec p = random_values(6 * 20, 1), x = random_values(4 * 6 * 20, 2);
  for (const DType dtype : {DType::f32, DType::bf16}) {
    Tensor t = to_tensor(x, {2, 2, 6, 20}, dtype);
    const Vec before = to_values(t);
    ops::add_position(to_tensor(p, {6, 20}), t);
    Vec expected = before;
    for (std::size_t i = 0; i < x.size(); ++i) expected[i] += p[i % p.size()];
    EXPECT_LT(relative_error(to_values(t), expected), tolerance(dtype));
  }
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

TEST_F(OpTest, AddRows) {
  Tensor y = poisoned({2, 2});
  ops::add_rows(to_tensor({1, 2, 3, 4}, {2, 2}), to_tensor({10, 20, 30, 40}, {2, 2}), y);
  EXPECT_EQ(to_values(y), (Vec{11, 22, 33, 44}));
}

}  // namespace
}  // namespace weft::test
