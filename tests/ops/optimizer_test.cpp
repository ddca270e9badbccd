#include <cstring>
#include <limits>
#include <vector>

#include "ops/optimizer.h"
#include "reference.h"

namespace weft::test {
namespace {

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

// Two of the columns of three rows, as the ranks of a step tell them.
TEST_F(OpTest, RunningAverages) {
  Tensor rows = Tensor::empty({12}, DType::f64), average = to_tensor({1, -2}, {2});
  for (int i = 0; i < 12; ++i) rows.data<double>()[i] = i;
  ops::running_average(rows, 4, 1, 0.5f, 0.9f, average);
  EXPECT_NEAR(to_values(average)[0], 0.9 + 0.1 * 0.5 * (1 + 5 + 9), 1e-6);
  EXPECT_NEAR(to_values(average)[1], -1.8 + 0.1 * 0.5 * (2 + 6 + 10), 1e-6);
  // A sum that is not finite changes nothing, and the other average all the same.
  for (const double bad : {std::nan(""), std::numeric_limits<double>::infinity()}) {
    rows.data<double>()[5] = bad;
    average = to_tensor({1, -2}, {2});
    ops::running_average(rows, 4, 1, 0.5f, 0.9f, average);
    EXPECT_EQ(to_values(average)[0], 1);
    EXPECT_NEAR(to_values(average)[1], -1.8 + 0.1 * 0.5 * (2 + 6 + 10), 1e-6);
  }
}

}  // namespace

namespace {

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

// Equal bits give equal sums, a single changed bit never does.
TEST_F(OpTest, ChecksumSeesEveryBit) {
  const Vec x = random_values(100002, 1);
  Tensor t = to_tensor(x, {100002});
  Tensor sum = Tensor::empty({2}, DType::f64), other = Tensor::empty({2}, DType::f64);
  ops::checksum(t, sum);
  ops::checksum(to_tensor(x, {100002}), other);
  const double* a = sum.data<double>();
  const double* b = other.data<double>();
  EXPECT_EQ(a[0], b[0]);
  EXPECT_EQ(a[1], b[1]);
  EXPECT_EQ(a[0], std::floor(a[0]));
  EXPECT_LT(a[0], 4294967296.0);
  for (const std::int64_t at : {0, 1, 77777, 100001})
    for (const int bit : {0, 13, 31}) {
      std::uint32_t word;
      std::memcpy(&word, t.data<float>() + at, 4);
      const std::uint32_t flipped = word ^ 1u << bit;
      std::memcpy(t.data<float>() + at, &flipped, 4);
      ops::checksum(t, other);
      EXPECT_TRUE(a[0] != b[0] || a[1] != b[1]) << at << " " << bit;
      std::memcpy(t.data<float>() + at, &word, 4);
    }
  std::swap(t.data<float>()[5], t.data<float>()[50000]);
  ops::checksum(t, other);
  EXPECT_TRUE(a[0] != b[0] || a[1] != b[1]);
}

}  // namespace
}  // namespace weft::test
