#include "ops/pointwise.h"

#include <cstring>
#include <limits>

#include "ops/layout.h"
#include "ops/optimizer.h"
#include "ops/reduce.h"
#include "reference.h"

namespace weft::test {
namespace {

double gelu(double z) {
  return 0.5 * z * (1 + std::tanh(std::sqrt(2 / M_PI) * (z + 0.044715 * z * z * z)));
}
double silu(double z) { return z / (1 + std::exp(-z)); }

double map_dot(double (*f)(double), const Vec& x, const Vec& g) {
  double s = 0;
  for (std::size_t i = 0; i < x.size(); ++i) s += f(x[i]) * g[i];
  return s;
}

TEST_F(OpTest, Gelu) {
  for (const DType dtype : {DType::f32, DType::bf16})
    for (const std::int64_t n : {1, 37, 100003}) {
      const Vec z = rounded(random_values(n, 1, 3.0), dtype),
                g = rounded(random_values(n, 2), dtype);
      Vec expected;
      for (const double v : z) expected.push_back(gelu(v));
      Tensor tz = to_tensor(z, {n}, dtype), y = poisoned({n}, dtype);
      ops::gelu_forward(tz, y);
      EXPECT_LT(relative_error(to_values(y), expected), tolerance(dtype));
      // As the MLP calls it: dz over dy, gelu(z) over z.
      Tensor d = to_tensor(g, {n}, dtype);
      ops::gelu_backward(tz, d, d, tz);
      EXPECT_LT(relative_error(to_values(tz), expected), tolerance(dtype));
      expect_gradient([&](const Vec& v) { return map_dot(gelu, v, g); }, z, to_values(d),
                      tolerance(dtype, 1e4));
    }
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

TEST_F(OpTest, Silu) {
  const Vec z = random_values(1001, 1, 3.0), g = random_values(1001, 2);
  Vec expected;
  for (const double v : z) expected.push_back(silu(v));
  Tensor y = poisoned({1001}), d = to_tensor(Vec(1001, 1.0), {1001});
  ops::silu_forward(to_tensor(z, {1001}), y);
  EXPECT_LT(relative_error(to_values(y), expected), tolerance(DType::f32));
  ops::silu_backward(to_tensor(z, {1001}), to_tensor(g, {1001}), d, true);
  Vec gradient = to_values(d);
  for (double& v : gradient) v -= 1.0;
  expect_gradient([&](const Vec& v) { return map_dot(silu, v, g); }, z, gradient, 1e-5);
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

TEST_F(OpTest, AdamWFollowsTheFormulaOverSteps) {
  const std::int64_t n = 20011;
  Vec p = random_values(n, 1), m(p.size(), 0.0), v(p.size(), 0.0), ema = p;
  Tensor tp = to_tensor(p, {n}), tm = to_tensor(m, {n}), tv = to_tensor(v, {n}),
         te = to_tensor(p, {n});
  Tensor copy = poisoned({n}, DType::bf16);
  const double lr = 1e-2, b1 = 0.9, b2 = 0.999, eps = 1e-8, wd = 0.1, decay = 0.99;
  for (int step = 1; step <= 3; ++step) {
    const Vec g = random_values(n, 10 + static_cast<std::uint64_t>(step));
    // The norm is not that of g: a shard sees a part of the gradient. The last step is not clipped.
    const double norm = 40, clip = step == 1 ? 20 : step == 2 ? 10 : 50;
    const double scale = std::min(1.0, clip / (norm + 1e-6));
    const double c1 = 1 - std::pow(b1, step), c2 = 1 - std::pow(b2, step);
    for (std::size_t i = 0; i < p.size(); ++i) {
      const double gi = g[i] * scale;
      m[i] = b1 * m[i] + (1 - b1) * gi;
      v[i] = b2 * v[i] + (1 - b2) * gi * gi;
      p[i] -= lr * (m[i] / c1 / (std::sqrt(v[i] / c2) + eps) + wd * p[i]);
      ema[i] = decay * ema[i] + (1 - decay) * p[i];
    }
    const ops::AdamW a{1e-2f,
                       0.9f,
                       0.999f,
                       1e-8f,
                       0.1f,
                       0.1f,
                       0.001f,
                       static_cast<float>(c1),
                       static_cast<float>(c2),
                       static_cast<float>(clip),
                       0.99f};
    Tensor squares = Tensor::empty({1}, DType::f64);
    squares.data<double>()[0] = norm * norm;
    ops::adamw_step(a, squares, to_tensor(g, {n}), tp, tm, tv, te, copy);
  }
  EXPECT_LT(relative_error(to_values(tp), p), 1e-5);
  EXPECT_LT(relative_error(to_values(tm), m), 1e-5);
  EXPECT_LT(relative_error(to_values(tv), v), 1e-5);
  EXPECT_LT(relative_error(to_values(te), ema), 1e-5);
  for (std::int64_t i = 0; i < n; ++i)
    ASSERT_EQ(copy.data<bf16>()[i].bits, bf16(tp.data<float>()[i]).bits);
}

TEST_F(OpTest, AdamWWithoutGradientAndTinyEpsilonStaysPut) {
  // eps 1e-15 is the released configuration: 0 / (0 + 1e-15) must be 0.
  Tensor p = to_tensor({1, 2, 3}, {3}), zero = to_tensor({0, 0, 0}, {3}), none;
  Tensor m = to_tensor({0, 0, 0}, {3}), v = to_tensor({0, 0, 0}, {3});
  Tensor squares = Tensor::empty({1}, DType::f64);
  squares.data<double>()[0] = 0;
  ops::adamw_step({1e-4f, 0.9f, 0.999f, 1e-15f, 0, 0.1f, 0.001f, 0.1f, 0.001f, 1, 0}, squares, zero,
                  p, m, v, none, none);
  EXPECT_EQ(to_values(p), (Vec{1, 2, 3}));
}

TEST_F(OpTest, AdamWLeavesEverythingWhereTheNormIsNotFinite) {
  for (const double bad : {std::nan(""), std::numeric_limits<double>::infinity()}) {
    Tensor p = to_tensor({1, 2}, {2}), m = to_tensor({3, 4}, {2}), v = to_tensor({5, 6}, {2});
    Tensor ema = to_tensor({7, 8}, {2}), copy = to_tensor({9, 10}, {2}, DType::bf16);
    Tensor squares = Tensor::empty({1}, DType::f64);
    squares.data<double>()[0] = bad;
    ops::adamw_step({1e-2f, 0.9f, 0.999f, 1e-8f, 0.1f, 0.1f, 0.001f, 0.1f, 0.001f, 0, 0.9f},
                    squares, to_tensor({1, 1}, {2}), p, m, v, ema, copy);
    EXPECT_EQ(to_values(p), (Vec{1, 2}));
    EXPECT_EQ(to_values(m), (Vec{3, 4}));
    EXPECT_EQ(to_values(v), (Vec{5, 6}));
    EXPECT_EQ(to_values(ema), (Vec{7, 8}));
    EXPECT_EQ(to_values(copy), (Vec{9, 10}));
  }
}

TEST_F(OpTest, SumOfSquares) {
  const Vec x = random_values(100003, 1);
  Tensor sum = Tensor::empty({1}, DType::f64);
  ops::sum_of_squares(to_tensor(x, {100003}), sum, false);
  EXPECT_NEAR(sum.data<double>()[0], dot(x, x), 1e-5 * dot(x, x));
  ops::sum_of_squares(to_tensor({3, 4}, {2}), sum, true);
  EXPECT_NEAR(sum.data<double>()[0], dot(x, x) + 25, 1e-5 * dot(x, x));
  Vec bad = x;
  bad[77777] = std::nan("");
  ops::sum_of_squares(to_tensor(bad, {100003}), sum, false);
  EXPECT_FALSE(std::isfinite(sum.data<double>()[0]));
  Tensor values = Tensor::empty({700}, DType::f64);
  std::fill_n(values.data<double>(), 700, 2.0);
  ops::carry_non_finite(values, sum);
  EXPECT_FALSE(std::isfinite(sum.data<double>()[0])) << "what was not finite stays so";
  sum.data<double>()[0] = 7;
  ops::carry_non_finite(values, sum);
  EXPECT_EQ(sum.data<double>()[0], 0);
  values.data<double>()[350] = std::numeric_limits<double>::infinity();
  ops::carry_non_finite(values, sum);
  EXPECT_FALSE(std::isfinite(sum.data<double>()[0]));
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
          expected[static_cast<std::size_t>(
              ((i / 105 * 4 + k.to_frame + t) * 9 + k.to_token + s) * 3 + c)] =
              a[static_cast<std::size_t>(i)];
      }
      Tensor y = to_tensor(b, to, dtype);
      ops::copy_tokens(to_tensor(a, from, dtype), k, y);
      const Tensor wanted = to_tensor(expected, to, dtype);
      EXPECT_EQ(std::memcmp(y.raw(), wanted.raw(), y.bytes()), 0)
          << name_of(dtype) << " T" << k.frames << " S" << k.tokens;
    }
  }
}

}  // namespace
}  // namespace weft::test
