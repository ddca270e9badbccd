#include "ops/random.h"
#include "reference.h"

namespace weft::test {
namespace {

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

}  // namespace

namespace {

constexpr std::int64_t B = 2, C = 3, T = 4, H = 3, W = 5, Co = 6;
const Shape x_shape{B, C, T, H, W}, out_shape{B, Co, T, H, W};

// docs/models/stdit3.md, Training loss, sum of the samples' losses times `weight`.
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
    ops::velocity_loss_backward(to, t0, te, tm, to_tensor({0.5}, {1}), dout);
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

}  // namespace
}  // namespace weft::test
