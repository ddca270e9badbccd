#include "ops/norm.h"

#include "reference.h"

namespace weft::test {
namespace {

struct Case {
  Shape x;  // [N, ..., C]
  int groups;
  bool silu;
  DType dtype = DType::f32;
};
constexpr double eps = 1e-6;

struct Moments {
  Vec mean, rstd;  // [N * groups]
};

Moments moments(const Case& c, const Vec& x) {
  const std::int64_t N = c.x[0], C = c.x[-1], P = c.x.numel() / (N * C), width = C / c.groups;
  Moments m;
  for (std::int64_t n = 0; n < N; ++n)
    for (std::int64_t g = 0; g < c.groups; ++g) {
      double mean = 0, var = 0;
      const auto each = [&](auto&& f) {
        for (std::int64_t p = 0; p < P; ++p)
          for (std::int64_t i = g * width; i < (g + 1) * width; ++i) f(x[(n * P + p) * C + i]);
      };
      const double count = static_cast<double>(P * width);
      each([&](double v) { mean += v / count; });
      each([&](double v) { var += (v - mean) * (v - mean) / count; });
      m.mean.push_back(mean);
      m.rstd.push_back(1 / std::sqrt(var + eps));
    }
  return m;
}

Vec group_norm(const Case& c, const Vec& x, const Vec& gamma, const Vec& beta) {
  const std::int64_t N = c.x[0], C = c.x[-1], P = c.x.numel() / (N * C);
  const Moments m = moments(c, x);
  Vec y(x.size());
  for (std::int64_t i = 0; i < c.x.numel(); ++i) {
    const std::int64_t channel = i % C, g = i / (P * C) * c.groups + channel / (C / c.groups);
    const double u = (x[i] - m.mean[g]) * m.rstd[g] * gamma[channel] + beta[channel];
    y[i] = c.silu ? u / (1 + std::exp(-u)) : u;
  }
  return y;
}

class GroupNormTest : public testing::TestWithParam<Case> {
 protected:
  std::unique_ptr<Arena> arena_ = Arena::reserve(std::size_t{1} << 30);
  ArenaScope scope_{*arena_};
};

TEST_P(GroupNormTest, ForwardAndBackward) {
  const Case c = GetParam();
  const std::int64_t n = c.x.numel(), C = c.x[-1];
  Vec x = random_values(n, 1);
  for (double& v : x) v = 2 * v + 3;  // a mean that must not cancel
  x = rounded(x, c.dtype);
  Vec gamma = random_values(C, 2, 0.3);
  for (double& v : gamma) v += 1;
  const Vec beta = random_values(C, 3, 0.5), g = rounded(random_values(n, 4), c.dtype);
  const Tensor tx = to_tensor(x, c.x, c.dtype), tg = to_tensor(g, c.x, c.dtype);
  const Tensor tgamma = to_tensor(gamma, {C}), tbeta = to_tensor(beta, {C});
  Tensor y = poisoned(c.x, c.dtype), stats = poisoned({c.x[0], c.groups, 2});
  ops::group_norm_forward(tx, tgamma, tbeta, c.groups, static_cast<float>(eps), c.silu, y, stats);
  const Vec expected = group_norm(c, x, gamma, beta);
  EXPECT_LT(relative_error(to_values(y), expected), tolerance(c.dtype));
  const Moments m = moments(c, x);
  for (std::size_t i = 0; i < m.mean.size(); ++i) {
    EXPECT_NEAR(stats.data<float>()[2 * i], m.mean[i], 1e-6 * std::abs(m.mean[i]) + 1e-6);
    EXPECT_NEAR(stats.data<float>()[2 * i + 1], m.rstd[i], 2e-6 * m.rstd[i]);
  }
  Tensor in_place = to_tensor(x, c.x, c.dtype);
  ops::group_norm_forward(in_place, tgamma, tbeta, c.groups, static_cast<float>(eps), c.silu,
                          in_place, stats);
  EXPECT_EQ(to_values(in_place), to_values(y));

  Tensor dx = poisoned(c.x, c.dtype);
  Tensor dgamma = to_tensor(Vec(C, 1.0), {C}), dbeta = to_tensor(Vec(C, 2.0), {C});
  ops::group_norm_backward(tx, tgamma, tbeta, stats, c.groups, c.silu, tg, dx, false, dgamma,
                           dbeta);
  Vec of_gamma = to_values(dgamma), of_beta = to_values(dbeta);
  for (double& v : of_gamma) v -= 1;
  for (double& v : of_beta) v -= 2;
  const double bound = tolerance(c.dtype, 4e4);
  const auto loss = [&](const Vec& a, const Vec& b, const Vec& d) {
    return dot(group_norm(c, a, b, d), g);
  };
  expect_gradient([&](const Vec& v) { return loss(v, gamma, beta); }, x, to_values(dx), bound);
  expect_gradient([&](const Vec& v) { return loss(x, v, beta); }, gamma, of_gamma, 1e-4);
  expect_gradient([&](const Vec& v) { return loss(x, gamma, v); }, beta, of_beta, 1e-4);

  // Accumulation adds to what is there; parameters that do not learn; dx over dy.
  Tensor none_gamma, none_beta, twice = to_tensor(to_values(dx), c.x, c.dtype);
  ops::group_norm_backward(tx, tgamma, tbeta, stats, c.groups, c.silu, tg, twice, true, none_gamma,
                           none_beta);
  Vec doubled = to_values(dx);
  for (double& v : doubled) v *= 2;
  EXPECT_LT(relative_error(to_values(twice), doubled), tolerance(c.dtype));
  Tensor over = to_tensor(g, c.x, c.dtype);
  ops::group_norm_backward(tx, tgamma, tbeta, stats, c.groups, c.silu, over, over, false,
                           none_gamma, none_beta);
  EXPECT_EQ(to_values(over), to_values(dx));
}

// Groups of one channel, of part of a vector and of several; positions that no chunk divides.
INSTANTIATE_TEST_SUITE_P(Shapes, GroupNormTest,
                         testing::Values(Case{{2, 3, 5, 32}, 32, true},
                                         Case{{1, 2, 3, 7, 12}, 4, false},
                                         Case{{2, 17, 17, 64}, 8, true}, Case{{1, 5, 128}, 4, true},
                                         Case{{3, 1, 1, 16}, 4, false},
                                         Case{{1, 4, 9, 17, 20}, 2, true},
                                         Case{{2, 5, 7, 32}, 8, true, DType::bf16},
                                         Case{{1, 270, 24}, 4, false, DType::bf16}));

// Values far from zero with a small spread: sums of squares would lose everything.
TEST_F(OpTest, GroupNormFarFromZero) {
  const Case c{{1, 1000, 8}, 2, false};
  Vec x = random_values(c.x.numel(), 1);
  for (double& v : x) v = 1000 + 0.1 * v;
  x = rounded(x, DType::f32);
  const Tensor one = to_tensor(Vec(8, 1.0), {8}), zero = to_tensor(Vec(8, 0.0), {8});
  Tensor y = poisoned(c.x), stats = poisoned({1, 2, 2});
  ops::group_norm_forward(to_tensor(x, c.x), one, zero, 2, static_cast<float>(eps), false, y,
                          stats);
  const Moments m = moments(c, x);
  for (std::size_t g = 0; g < 2; ++g)
    EXPECT_NEAR(stats.data<float>()[2 * g + 1], m.rstd[g], 1e-4 * m.rstd[g]);
  EXPECT_LT(relative_error(to_values(y), group_norm(c, x, Vec(8, 1.0), Vec(8, 0.0))), 1e-3);
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
