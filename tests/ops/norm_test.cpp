#include "ops/norm.h"
#include "reference.h"

namespace weft::test {
namespace {

// Values far from zero with a small spread: sums of squares would lose everything.
TEST_F(OpTest, GroupNormFarFromZero) {
  const Shape shape{1, 1000, 8};
  const std::int64_t n = shape.numel();
  Vec x = random_values(n, 1);
  for (double& v : x) v = 1000 + 0.1 * v;
  x = rounded(x, DType::f32);
  double mean = 0, var = 1e-6;
  for (const double v : x) mean += v / static_cast<double>(n);
  for (const double v : x) var += (v - mean) * (v - mean) / static_cast<double>(n);
  Vec wanted;
  for (const double v : x) wanted.push_back((v - mean) / std::sqrt(var));
  const Tensor one = to_tensor(Vec(8, 1.0), {8}), zero = to_tensor(Vec(8, 0.0), {8});
  Tensor y = poisoned(shape), stats = poisoned({1, 1, 2});
  ops::group_norm_forward(to_tensor(x, shape), one, zero, 1, 1e-6f, false, y, stats);
  EXPECT_NEAR(stats.data<float>()[1] * std::sqrt(var), 1, 1e-4);
  EXPECT_LT(relative_error(to_values(y), wanted), 1e-3);
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
