#include "ops/loss.h"

#include <algorithm>

#include "ops/pointwise.h"
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

TEST_F(OpTest, LeCamHoldsLogitsToTheirAverages) {
  const auto lecam = [](double mean, double other, double sign) {
    const double d = std::max(0.0, sign * (mean - other));
    return d * d;
  };
  for (const double sign : {1.0, -1.0})
    for (const double mean : {-0.7, 0.1, 0.9}) {
      Tensor loss = to_tensor({2}, {1}), slope = poisoned({1});
      ops::lecam(to_tensor({mean}, {1}), to_tensor({0.3}, {1}), static_cast<float>(sign), 5, loss,
                 slope);
      EXPECT_NEAR(value_of(loss), 2 + 5 * lecam(mean, 0.3, sign), 1e-6);
      const double h = 1e-6;
      EXPECT_NEAR(value_of(slope),
                  (lecam(mean + h, 0.3, sign) - lecam(mean - h, 0.3, sign)) / (2 * h), 1e-5);
    }
}

TEST_F(OpTest, NormsOfGradientsAreToBeOne) {
  const Shape shape{1, 3, 5, 7, 3};
  Vec g = random_values(shape.numel(), 1, 0.2);
  const auto f = [&](const Vec& v) {
    double sum = 0;
    for (std::size_t frame = 0; frame < 3; ++frame) {
      double square = 0;
      for (std::size_t i = frame * 105; i < (frame + 1) * 105; ++i) square += v[i] * v[i];
      sum += (std::sqrt(square) - 1) * (std::sqrt(square) - 1) / 3;
    }
    return sum;
  };
  Tensor norms = poisoned({3}), loss = to_tensor({0}, {1}), dg = to_tensor(g, shape);
  ops::gradient_penalty_forward(dg, 10, norms, loss);
  EXPECT_NEAR(value_of(loss) / (10 * f(g)), 1, 1e-5);
  ops::gradient_penalty_backward(dg, norms, 1, dg);
  expect_gradient(f, g, to_values(dg), 1e-4);
  std::fill_n(g.begin(), 105, 0.0);  // no direction to go
  dg = to_tensor(g, shape);
  ops::gradient_penalty_forward(dg, 1, norms, loss);
  ops::gradient_penalty_backward(dg, norms, 1, dg);
  EXPECT_EQ(to_values(dg)[0], 0);
  EXPECT_NE(to_values(dg)[105], 0);
}

}  // namespace
}  // namespace weft::test
