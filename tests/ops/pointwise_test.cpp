#include "ops/pointwise.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "ops/loss.h"
#include "reference.h"

namespace weft::test {
namespace {

double gelu(double z) {
  return 0.5 * z * (1 + std::tanh(std::sqrt(2 / M_PI) * (z + 0.044715 * z * z * z)));
}

TEST_F(OpTest, GeluOfExtremeValuesStaysFinite) {
  const Vec z = {-1e4, -88, -20, -1e-30, 0, 1e-30, 20, 88, 1e4};
  Tensor y = poisoned({9});
  ops::gelu_forward(to_tensor(z, {9}), y);
  for (std::size_t i = 0; i < z.size(); ++i)
    EXPECT_NEAR(to_values(y)[i], gelu(z[i]), 1e-6 * (1 + std::abs(z[i])));
}

TEST_F(OpTest, GeluKeepsNaN) {
  Tensor y = to_tensor({0}, {1});
  ops::gelu_forward(to_tensor({std::nan("")}, {1}), y);
  EXPECT_TRUE(std::isnan(to_values(y)[0]));
}

TEST_F(OpTest, AddZeroConvert) {
  const Vec a = random_values(70001, 1), b = random_values(70001, 2);
  Tensor y = to_tensor(a, {70001});
  ops::add_inplace(to_tensor(b, {70001}), y);
  for (std::size_t i = 0; i < a.size(); ++i)
    ASSERT_EQ(y.data<float>()[i], static_cast<float>(a[i]) + static_cast<float>(b[i]));
  Tensor half = poisoned({70001}, DType::bf16), back = poisoned({70001});
  ops::convert(y, half);
  ops::convert(half, back);
  for (std::size_t i = 0; i < a.size(); ++i)
    ASSERT_EQ(back.data<float>()[i], static_cast<float>(bf16(y.data<float>()[i])));
  ops::fill_zero(y);
  for (const double v : to_values(y)) ASSERT_EQ(v, 0.0);
}

TEST_F(OpTest, EveryHalfNumberIsWidened) {
  Tensor x = Tensor::empty({1 << 16}, DType::f16), y = poisoned({1 << 16});
  for (int i = 0; i < 1 << 16; ++i) x.data<f16>()[i].bits = static_cast<std::uint16_t>(i);
  ops::convert(x, y);
  for (int i = 0; i < 1 << 16; ++i) {
    const float want = static_cast<float>(x.data<f16>()[i]), got = y.data<float>()[i];
    ASSERT_TRUE(got == want || (std::isnan(want) && std::isnan(got))) << i;
  }
}

TEST_F(OpTest, GatedGelu) {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    const std::int64_t M = 7, F = 1030;
    const Vec gu = rounded(random_values(2 * M * F, 1, 2.0), dtype);
    Vec wanted;
    for (std::int64_t i = 0; i < M * F; ++i) {
      const double g = gu[i];
      const double u = std::sqrt(2 / M_PI) * (g + 0.044715 * g * g * g);
      wanted.push_back(0.5 * g * (1 + std::tanh(u)) * gu[M * F + i]);
    }
    const Tensor both = to_tensor(gu, {2, M, F}, dtype);
    Tensor y = poisoned({M, F}, dtype);
    ops::gated_gelu_forward(both, y);
    EXPECT_LT(relative_error(to_values(y), wanted), tolerance(dtype));
    Tensor gate = both.slice(0, 1).view({M, F});  // in place of the gates
    ops::gated_gelu_forward(both, gate);
    EXPECT_EQ(to_values(gate), to_values(y));
  }
}

// Log variances out of bounds count as the bounds, and have no slope.
TEST_F(OpTest, DivergenceFromTheNormal) {
  const Shape shape{1, 2, 3, 2, 8};
  Vec m = random_values(shape.numel(), 3, 2);
  m[4] = 25, m[5] = -40;  // log variances out of bounds
  const auto f = [&](const Vec& v) {
    double sum = 0;
    for (std::size_t i = 0; i < v.size(); i += 8)
      for (std::size_t c = 0; c < 4; ++c) {
        const double lv = std::clamp(v[i + 4 + c], -30.0, 20.0);
        sum += 0.5 * (v[i + c] * v[i + c] + std::exp(lv) - 1 - lv);
      }
    return sum;
  };
  Tensor loss = to_tensor({0}, {1});
  ops::kl_forward(to_tensor(m, shape), 1e-3f, loss);
  EXPECT_NEAR(loss.data<float>()[0] / (1e-3 * f(m)), 1, 1e-6);
  Tensor d = poisoned(shape);
  ops::kl_backward(to_tensor(m, shape), 2, d, false);
  EXPECT_EQ(to_values(d)[4], 0);
  EXPECT_EQ(to_values(d)[5], 0);
  m[4] = 1, m[5] = -1;
  ops::kl_backward(to_tensor(m, shape), 1, d, false);
  expect_gradient(f, m, to_values(d), 1e-5);
}

}  // namespace
}  // namespace weft::test
