#include "ops/loss.h"
#include "ops/pointwise.h"
#include "ops/pool.h"

#include <algorithm>

#include "reference.h"

namespace weft::test {
namespace {

using ops::GanLoss;

// Away from the kinks of |x|, max and hinge, where differences mean nothing.
Vec away_from(Vec v, double kink) {
  for (double& x : v)
    if (std::abs(x - kink) < 0.05) x = kink + 0.1;
  return v;
}

float value_of(const Tensor& loss) { return loss.data<float>()[0]; }

TEST_F(OpTest, AbsoluteDifferencesAddUp) {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    const Shape shape{1, 3, 5, 7, 3};
    const Vec a = rounded(random_values(shape.numel(), 1), dtype),
              b = rounded(random_values(shape.numel(), 2), dtype);
    double sum = 0;
    for (std::size_t i = 0; i < a.size(); ++i) sum += std::abs(a[i] - b[i]);
    Tensor loss = to_tensor({3}, {1});
    ops::l1_forward(to_tensor(a, shape, dtype), to_tensor(b, shape, dtype), 0.25f, loss);
    EXPECT_NEAR(value_of(loss), 3 + 0.25 * sum, 1e-6 * sum);
    Tensor da = poisoned(shape, dtype);
    ops::l1_backward(to_tensor(a, shape, dtype), to_tensor(b, shape, dtype), 0.5f, da, false);
    ops::l1_backward(to_tensor(a, shape, dtype), to_tensor(a, shape, dtype), 7, da, true);
    const Vec d = to_values(da);
    for (std::size_t i = 0; i < a.size(); ++i)
      EXPECT_EQ(d[i], a[i] > b[i] ? 0.5 : a[i] < b[i] ? -0.5 : 0.0);
  }
}

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
  EXPECT_NEAR(value_of(loss) / (1e-3 * f(m)), 1, 1e-6);
  Tensor d = poisoned(shape);
  ops::kl_backward(to_tensor(m, shape), 2, d, false);
  EXPECT_EQ(to_values(d)[4], 0);
  EXPECT_EQ(to_values(d)[5], 0);
  m[4] = 1, m[5] = -1;
  ops::kl_backward(to_tensor(m, shape), 1, d, false);
  expect_gradient(f, m, to_values(d), 1e-5);
}

TEST_F(OpTest, LeakyReluInPlace) {
  const Vec x = away_from(random_values(1000, 4), 0), g = random_values(1000, 5);
  for (const double slope : {0.0, 0.2}) {
    Tensor y = to_tensor(x, {1000}), d = to_tensor(g, {1000});
    ops::leaky_relu_forward(y, static_cast<float>(slope), y);
    ops::leaky_relu_backward(y, static_cast<float>(slope), d, d);
    for (std::size_t i = 0; i < x.size(); ++i) {
      EXPECT_NEAR(to_values(y)[i], x[i] > 0 ? x[i] : slope * x[i], 1e-6);
      EXPECT_NEAR(to_values(d)[i], x[i] > 0 ? g[i] : slope * g[i], 1e-6);
    }
  }
}

// Odd sizes: the last row and column belong to no rectangle.
TEST_F(OpTest, MaxPool) {
  const Shape in{1, 2, 5, 7, 20}, out{1, 2, 2, 3, 20};
  const Vec x = random_values(in.numel(), 6), g = random_values(out.numel(), 7);
  const auto pooled = [&](const Vec& v) {
    Vec y;
    for (int f = 0; f < 2; ++f)
      for (int r = 0; r < 2; ++r)
        for (int q = 0; q < 3; ++q)
          for (int c = 0; c < 20; ++c) {
            double best = -1e9;
            for (int k = 0; k < 4; ++k)
              best = std::max(best, v[static_cast<std::size_t>(
                                        ((f * 5 + 2 * r + k / 2) * 7 + 2 * q + k % 2) * 20 + c)]);
            y.push_back(best);
          }
    return y;
  };
  Tensor y = poisoned(out), dx = poisoned(in);
  ops::max_pool_forward(to_tensor(x, in), y);
  EXPECT_LT(relative_error(to_values(y), pooled(x)), 1e-6);
  ops::max_pool_backward(to_tensor(x, in), to_tensor(g, out), dx);
  expect_gradient([&](const Vec& v) { return dot(pooled(v), g); }, x, to_values(dx), 1e-5);
  // Among equals the first takes it all.
  ops::max_pool_backward(to_tensor(Vec(x.size(), 1.0), in), to_tensor(g, out), dx);
  EXPECT_EQ(to_values(dx)[0], to_values(to_tensor(g, out))[0]);
  EXPECT_EQ(to_values(dx)[20], 0);
}

TEST_F(OpTest, DistanceOfNormalisedFeatures) {
  const std::int64_t C = 37;
  const Shape shape{1, 2, 3, 2, C};
  const Vec a = random_values(shape.numel(), 8), b = random_values(shape.numel(), 9);
  Vec w = random_values(C, 10);
  for (double& x : w) x = std::abs(x);
  const auto f = [&](const Vec& v) {
    double sum = 0;
    for (std::size_t p = 0; p < v.size(); p += C) {
      double na = 0, nb = 0;
      for (std::size_t c = 0; c < C; ++c) na += a[p + c] * a[p + c], nb += v[p + c] * v[p + c];
      for (std::size_t c = 0; c < C; ++c) {
        const double d = a[p + c] / (std::sqrt(na) + 1e-10) - v[p + c] / (std::sqrt(nb) + 1e-10);
        sum += w[c] * d * d / 6;
      }
    }
    return sum;
  };
  Tensor loss = to_tensor({0}, {1}), db = poisoned(shape);
  ops::lpips_forward(to_tensor(a, shape), to_tensor(b, shape), to_tensor(w, {C}), 2, loss);
  EXPECT_NEAR(value_of(loss) / (2 * f(b)), 1, 1e-5);
  ops::lpips_backward(to_tensor(a, shape), to_tensor(b, shape), to_tensor(w, {C}), 1, db);
  expect_gradient(f, b, to_values(db), 1e-4);
  const Tensor zero = to_tensor(Vec(a.size(), 0.0), shape);
  ops::lpips_backward(to_tensor(a, shape), zero, to_tensor(w, {C}), 1, db);
  EXPECT_EQ(to_values(db), Vec(a.size(), 0.0));
}

TEST_F(OpTest, LossesOfLogits) {
  const Shape shape{1, 3, 2, 5, 1};
  const Vec x = away_from(away_from(random_values(shape.numel(), 11, 2), 1), -1);
  for (const GanLoss kind : {GanLoss::hinge, GanLoss::logistic, GanLoss::linear})
    for (const double s : {1.0, -1.0}) {
      const auto f = [&](const Vec& v) {
        double sum = 0;
        for (const double e : v)
          sum += kind == GanLoss::hinge      ? std::max(0.0, 1 + s * e)
                 : kind == GanLoss::logistic ? std::log1p(std::exp(s * e))
                                             : s * e;
        return sum / static_cast<double>(v.size());
      };
      Tensor loss = to_tensor({0}, {1}), dx = poisoned(shape);
      ops::gan_loss_forward(to_tensor(x, shape), kind, static_cast<float>(s), 0.5f, loss);
      EXPECT_NEAR(value_of(loss), 0.5 * f(x), 1e-5);
      ops::gan_loss_backward(to_tensor(x, shape), kind, static_cast<float>(s), 1, dx, false);
      expect_gradient(f, x, to_values(dx), 1e-4);
    }
}

TEST_F(OpTest, AdaptiveWeights) {
  const Vec n = random_values(500, 12), g = random_values(500, 13, 0.1);
  Tensor w = poisoned({1}), y = to_tensor(n, {500}, DType::bf16);
  ops::adaptive_weight(to_tensor(n, {500}), to_tensor(g, {500}), 0.5f, w);
  const double expected = 0.5 * std::sqrt(dot(n, n)) / (std::sqrt(dot(g, g)) + 1e-4);
  EXPECT_NEAR(value_of(w) / expected, 1, 1e-5);
  ops::scaled_add(to_tensor(g, {500}), 2, w, y, true);
  Vec sum = rounded(n, DType::bf16);
  for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += 2 * expected * g[i];
  EXPECT_LT(relative_error(to_values(y), sum), tolerance(DType::bf16));
  ops::adaptive_weight(to_tensor(n, {500}), to_tensor(Vec(500, 0.0), {500}), 1, w);
  EXPECT_EQ(value_of(w), 1e4f);
}

}  // namespace
}  // namespace weft::test
