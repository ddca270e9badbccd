#include "ops/diffusion.h"
#include "ops/layout.h"
#include "ops/random.h"
#include "ops/reduce.h"

#include "reference.h"

namespace weft::test {
namespace {

constexpr std::int64_t B = 2, C = 3, T = 4, H = 3, W = 5, Co = 6;
const Shape x_shape{B, C, T, H, W}, out_shape{B, Co, T, H, W};

// specs/rectified_flow.md 3.6, sum of the samples' losses times `weight`.
double loss_of(const Vec& out, const Vec& x0, const Vec& eps, const Vec& mask,
               std::int64_t sample) {
  double sum = 0, count = 0;
  for (std::int64_t t = 0; t < T; ++t) {
    if (mask[sample * T + t] == 0) continue;
    for (std::int64_t c = 0; c < C; ++c)
      for (std::int64_t p = 0; p < H * W; ++p) {
        const std::int64_t i = ((sample * C + c) * T + t) * H * W + p;
        const double v = out[((sample * Co + c) * T + t) * H * W + p];
        sum += std::pow(v - (x0[i] - eps[i]), 2);
        ++count;
      }
  }
  return count > 0 ? sum / count : 0;
}

TEST_F(OpTest, InterpolateLeavesCleanFrames) {
  const Vec x0 = random_values(x_shape.numel(), 1), eps = random_values(x_shape.numel(), 2);
  Tensor xs = poisoned(x_shape);
  ops::flow_interpolate(to_tensor(x0, x_shape), to_tensor(eps, x_shape),
                        to_tensor({250, 1000}, {2}),
                        to_tensor({1, 0, 1, 1, 1, 1, 1, 0}, {B, T}, DType::u8), xs);
  const auto at = [&](std::int64_t b, std::int64_t t) { return ((b * C + 1) * T + t) * H * W + 4; };
  EXPECT_NEAR(xs.data<float>()[at(0, 0)], 0.75 * x0[at(0, 0)] + 0.25 * eps[at(0, 0)], 1e-6);
  EXPECT_EQ(xs.data<float>()[at(0, 1)], static_cast<float>(x0[at(0, 1)]));
  EXPECT_NEAR(xs.data<float>()[at(1, 0)], eps[at(1, 0)], 1e-6);
}

TEST_F(OpTest, VelocityLossAndItsGradient) {
  const Vec x0 = random_values(x_shape.numel(), 1), eps = random_values(x_shape.numel(), 2);
  const Vec out = random_values(out_shape.numel(), 3);
  for (const bool masked : {false, true}) {
    const Vec mask = masked ? Vec{1, 0, 1, 1, 0, 0, 1, 0} : Vec(8, 1.0);
    const Tensor tm = masked ? to_tensor(mask, {B, T}, DType::u8) : Tensor();
    const Tensor t0 = to_tensor(x0, x_shape), te = to_tensor(eps, x_shape),
                 to = to_tensor(out, out_shape);
    Tensor loss = poisoned({B}), dout = poisoned(out_shape);
    ops::velocity_loss_forward(to, t0, te, tm, loss);
    for (std::int64_t b = 0; b < B; ++b)
      EXPECT_NEAR(loss.data<float>()[b], loss_of(out, x0, eps, mask, b), 1e-5);
    ops::velocity_loss_backward(to, t0, te, tm, 0.5f, dout);
    const auto weighted = [&](const Vec& v) {
      return 0.5 * (loss_of(v, x0, eps, mask, 0) + loss_of(v, x0, eps, mask, 1));
    };
    expect_gradient(weighted, out, to_values(dout), 1e-5);
    for (std::int64_t i = 0; i < out_shape.numel(); ++i) {
      if (i / (T * H * W) % Co >= C) {  // the sigma head gets nothing
        ASSERT_EQ(dout.data<float>()[i], 0.0f);
      }
    }
  }
}

TEST_F(OpTest, LossWithoutAnyFrameIsZeroNotNaN) {
  const Tensor z = to_tensor(random_values(x_shape.numel(), 1), x_shape);
  const Tensor out = to_tensor(random_values(out_shape.numel(), 2), out_shape);
  const Tensor mask = to_tensor({0, 0, 0, 0, 1, 1, 1, 1}, {B, T}, DType::u8);
  Tensor loss = poisoned({B}), dout = poisoned(out_shape);
  ops::velocity_loss_forward(out, z, z, mask, loss);
  ops::velocity_loss_backward(out, z, z, mask, 1, dout);
  EXPECT_EQ(loss.data<float>()[0], 0.0f);
  for (const double v : to_values(dout)) ASSERT_TRUE(std::isfinite(v));
}

TEST_F(OpTest, LossesAreAddedInF64) {
  Tensor total = Tensor::empty({1}, DType::f64);
  total.data<double>()[0] = 1e9;  // where f32 would lose the addends
  ops::add_sum(to_tensor({0.25, 0.5, 2}, {3}), total);
  EXPECT_EQ(total.data<double>()[0], 1e9 + 2.75);
}

TEST_F(OpTest, NormalNoiseIsAFunctionOfItsKey) {
  Tensor a = poisoned({100001}), b = poisoned({100001}), c = poisoned({100001});
  ops::fill_normal(1, static_cast<int>(Purpose::noise), 5, 9, a);
  ops::fill_normal(1, static_cast<int>(Purpose::noise), 5, 9, b);
  ops::fill_normal(1, static_cast<int>(Purpose::noise), 6, 9, c);
  EXPECT_EQ(to_values(a), to_values(b));
  double mean = 0, square = 0, cross = 0;
  for (std::int64_t i = 0; i < 100001; ++i) {
    const double v = a.data<float>()[i];
    mean += v / 100001;
    square += v * v / 100001;
    cross += v * c.data<float>()[i] / 100001;
  }
  EXPECT_NEAR(mean, 0, 0.02);
  EXPECT_NEAR(square, 1, 0.03);
  EXPECT_NEAR(cross, 0, 0.02);
  const Philox random(1, Purpose::noise, 5, 9);
  for (const std::uint32_t i : {0u, 1u, 2u, 3u, 99999u})
    EXPECT_EQ(a.data<float>()[i], random.normal(i));
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

TEST_F(OpTest, GuidedEulerStep) {
  const Shape z_shape{1, 2, 2, 1, 2}, o_shape{2, 4, 2, 1, 2};
  const Vec z = random_values(8, 1), out = random_values(32, 2);
  Tensor t = to_tensor(z, z_shape);
  ops::guided_euler_step(to_tensor(out, o_shape), 7.0f, to_tensor({0.1}, {1}),
                         to_tensor({1, 0}, {1, 2}, DType::u8), t);
  for (int c = 0; c < 2; ++c)
    for (int f = 0; f < 2; ++f)
      for (int p = 0; p < 2; ++p) {
        const int i = (c * 2 + f) * 2 + p;
        const double vc = out[i], vu = out[16 + i];
        const double expected = f == 0 ? z[i] + 0.1 * (vu + 7 * (vc - vu)) : z[i];
        EXPECT_NEAR(t.data<float>()[i], expected, 1e-5);
      }
}

}  // namespace
}  // namespace weft::test
