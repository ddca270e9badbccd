#include <cstring>

#include "ops/layout.h"
#include "ops/pointwise.h"
#include "reference.h"

namespace weft::test {
namespace {

TEST_F(OpTest, ChannelsLastAndBack) {
  const Shape first{2, 3, 4, 5, 7}, last{2, 4, 5, 7, 3};
  for (const DType dtype : {DType::f32, DType::bf16}) {
    const Vec x = rounded(random_values(first.numel(), 1), dtype);
    Tensor y = poisoned(last, dtype), back = poisoned(first, dtype);
    ops::to_channels_last(to_tensor(x, first, dtype), y);
    const Vec ys = to_values(y);
    for (std::size_t b = 0; b < 2; ++b)
      for (std::size_t c = 0; c < 3; ++c)
        for (std::size_t p = 0; p < 140; ++p)
          ASSERT_EQ(ys[(b * 140 + p) * 3 + c], x[(b * 3 + c) * 140 + p]);
    ops::to_channels_first(y, back);
    EXPECT_EQ(to_values(back), x);
  }
}

TEST_F(OpTest, DepthToTime) {
  const std::int64_t B = 2, T = 3, P = 6, C = 5;
  for (const DType dtype : {DType::f32, DType::bf16}) {
    const Shape xs{B, T, 2, 3, 2 * C}, ys{B, 2 * T, 2, 3, C};
    const Vec x = rounded(random_values(xs.numel(), 1), dtype);
    Tensor y = poisoned(ys, dtype), dx = poisoned(xs, dtype);
    ops::depth_to_time_forward(to_tensor(x, xs, dtype), y);
    const Vec got = to_values(y), g = rounded(random_values(ys.numel(), 2), dtype);
    ops::depth_to_time_backward(to_tensor(g, ys, dtype), dx);
    const Vec back = to_values(dx);
    for (std::int64_t b = 0; b < B; ++b)
      for (std::int64_t t = 0; t < 2 * T; ++t)
        for (std::int64_t p = 0; p < P; ++p)
          for (std::int64_t c = 0; c < C; ++c) {
            const auto from =
                static_cast<std::size_t>((((b * T) + t / 2) * P + p) * 2 * C + 2 * c + t % 2);
            const auto to = static_cast<std::size_t>((((b * 2 * T) + t) * P + p) * C + c);
            ASSERT_EQ(got[to], x[from]);
            ASSERT_EQ(back[from], g[to]);
          }
  }
}

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

TEST_F(OpTest, CopyTokensMovesTheBlockAndNothingElse) {
  const Shape from{2, 5, 7, 3}, to{2, 4, 9, 3};
  for (const DType dtype : {DType::f32, DType::bf16, DType::i32, DType::u8}) {
    Vec a, b;
    for (std::int64_t i = 0; i < from.numel(); ++i) a.push_back(static_cast<double>(i % 120));
    for (std::int64_t i = 0; i < to.numel(); ++i) b.push_back(static_cast<double>(200 + i % 50));
    for (const auto& k : {ops::TokenBlock{2, 4, 1, 3, 2, 5}, ops::TokenBlock{4, 7, 0, 0, 0, 0},
                          ops::TokenBlock{0, 4, 5, 0, 0, 0}, ops::TokenBlock{1, 0, 0, 0, 3, 0}}) {
      Vec expected = b;
      for (std::int64_t i = 0; i < from.numel(); ++i) {
        const std::int64_t c = i % 3, s = i / 3 % 7 - k.from_token, t = i / 21 % 5 - k.from_frame;
        if (0 <= s && s < k.tokens && 0 <= t && t < k.frames)
          expected[((i / 105 * 4 + k.to_frame + t) * 9 + k.to_token + s) * 3 + c] = a[i];
      }
      Tensor y = to_tensor(b, to, dtype);
      ops::copy_tokens(to_tensor(a, from, dtype), k, y);
      const Tensor wanted = to_tensor(expected, to, dtype);
      EXPECT_EQ(std::memcmp(y.raw(), wanted.raw(), y.bytes()), 0)
          << name_of(dtype) << " T" << k.frames << " S" << k.tokens;
    }
  }
}

TEST_F(OpTest, FramesBecomeLatentsInMinusOneToOne) {
  Vec frames;
  for (int i = 0; i < 2 * 1 * 2 * 3; ++i) frames.push_back(i == 0 ? 0 : i == 11 ? 255 : 10 * i);
  Tensor x = poisoned({3, 2, 1, 2});
  ops::frames_to_latent(to_tensor(frames, {2, 1, 2, 3}, DType::u8), x);
  EXPECT_EQ(x.data<float>()[0], -1.0f);
  EXPECT_NEAR(x.data<float>()[2 * 4 + 3], 1.0f, 1e-6);
  EXPECT_NEAR(x.data<float>()[1 * 4 + 2], 70 / 127.5 - 1,
              1e-6);  // channel 1, third pixel: element 2*3+1
}

// Every level, its borders, beyond the ends, and what is not finite.
TEST_F(OpTest, FramesBecomePixels) {
  Vec values;
  std::vector<int> wanted;
  for (int level = 0; level < 256; ++level)
    for (const double off : {-0.49, 0.0, 0.49}) {
      values.push_back(std::clamp((level + off) / 255, -0.01, 1.01) * 2 - 1);
      wanted.push_back(level);
    }
  values.insert(values.end(), {-7, 7, 1e30, -1e30, INFINITY, -INFINITY, NAN, 1.0});
  wanted.insert(wanted.end(), {0, 255, 255, 0, 0, 0, 0, 255});
  // The last frame has what is not finite; 776 = 8 * 97 values.
  const std::int64_t n = std::ssize(values);
  Tensor pixels = Tensor::empty({2, n / 2, 1, 1}, DType::u8);
  Tensor bad = to_tensor({0, 2}, {2}, DType::i32);
  ops::frames_to_pixels(to_tensor(values, {2, n / 2, 1, 1}), pixels, bad);
  for (std::size_t i = 0; i < wanted.size(); ++i)
    EXPECT_EQ(pixels.data<std::uint8_t>()[i], wanted[i]) << values[i];
  EXPECT_EQ(bad.data<std::int32_t>()[0], 0);
  EXPECT_EQ(bad.data<std::int32_t>()[1], 5);
}

}  // namespace

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
