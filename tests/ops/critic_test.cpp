
#include <algorithm>

#include "ops/loss.h"
#include "ops/norm.h"
#include "ops/optimizer.h"
#include "reference.h"

namespace weft::test {
namespace {

float value_of(const Tensor& t) { return t.data<float>()[0]; }

TEST_F(OpTest, VerdictsBesideTheirAverages) {
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

// The tangent of a BatchNorm along xt: what a step of h along it changes, divided by h.
Vec tangent_of(const Vec& x, const Vec& xt, const Vec& gamma) {
  const std::size_t C = gamma.size(), P = x.size() / C;
  Vec yt(x.size());
  for (std::size_t c = 0; c < C; ++c) {
    double mean = 0, var = 0, mean_t = 0, along = 0;
    const double n = static_cast<double>(P);
    for (std::size_t p = 0; p < P; ++p) mean += x[p * C + c] / n, mean_t += xt[p * C + c] / n;
    for (std::size_t p = 0; p < P; ++p) var += std::pow(x[p * C + c] - mean, 2) / n;
    const double rstd = 1 / std::sqrt(var + 1e-5);
    for (std::size_t p = 0; p < P; ++p) along += (x[p * C + c] - mean) * rstd * xt[p * C + c] / n;
    for (std::size_t p = 0; p < P; ++p)
      yt[p * C + c] =
          gamma[c] * rstd * (xt[p * C + c] - mean_t - (x[p * C + c] - mean) * rstd * along);
  }
  return yt;
}

TEST_F(OpTest, TangentOfBatchNormAndItsGradient) {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    const Shape shape{1, 3, 11, 13, 5};  // more positions than a chunk holds
    Vec x = random_values(shape.numel(), 1), gamma = random_values(5, 2, 0.3);
    for (double& v : x) v = 2 * v + 3;
    for (double& v : gamma) v += 1;
    x = rounded(x, dtype);
    const Vec xt = rounded(random_values(shape.numel(), 3), dtype),
              d = rounded(random_values(shape.numel(), 4), dtype);
    const Tensor tx = to_tensor(x, shape, dtype), txt = to_tensor(xt, shape, dtype),
                 td = to_tensor(d, shape, dtype), tgamma = to_tensor(gamma, {5}),
                 zero = to_tensor(Vec(5, 0.0), {5});
    Tensor y = poisoned(shape, dtype), stats = poisoned({1, 5, 2}), yt = poisoned(shape, dtype);
    Tensor none, dx = poisoned(shape, dtype), dgamma = to_tensor(Vec(5, 1.0), {5});
    ops::group_norm_forward(tx, tgamma, zero, 5, 1e-5f, false, y, stats);
    ops::group_norm_backward(tx, tgamma, zero, stats, 5, false, txt, yt, false, none, none);
    EXPECT_LT(relative_error(to_values(yt), tangent_of(x, xt, gamma)), tolerance(dtype, 1e4));

    ops::batch_norm_tangent_backward(tx, tgamma, stats, txt, td, dx, false, dgamma);
    expect_gradient([&](const Vec& v) { return dot(tangent_of(v, xt, gamma), d); }, x,
                    to_values(dx), tolerance(dtype, 4e4));
    Vec of_gamma = to_values(dgamma);
    for (double& v : of_gamma) v -= 1;
    expect_gradient([&](const Vec& v) { return dot(tangent_of(x, xt, v), d); }, gamma, of_gamma,
                    1e-4);
    Tensor twice = to_tensor(to_values(dx), shape, dtype);
    ops::batch_norm_tangent_backward(tx, tgamma, stats, txt, td, twice, true, none);
    Vec doubled = to_values(dx);
    for (double& v : doubled) v *= 2;
    EXPECT_LT(relative_error(to_values(twice), doubled), tolerance(dtype));
  }
}

}  // namespace
}  // namespace weft::test
