#include <omp.h>

#include "ops/norm.h"
#include "reference.h"

namespace weft::test {
namespace {

struct Case {
  std::int64_t B, T, S, C;
  DType dtype;
};

// LN(x)(1 + scale) + shift per frame, in f64; m is [G,K,C].
Vec layer_norm_modulate(const Case& c, const Vec& x, const Vec& m, const Vec& rows, int K,
                        int shift, int scale) {
  Vec y(x.size());
  for (std::int64_t token = 0; token < c.B * c.T * c.S; ++token) {
    const auto row = static_cast<std::int64_t>(rows[token / c.S]);
    double mean = 0, var = 0;
    for (std::int64_t i = 0; i < c.C; ++i) mean += x[token * c.C + i] / static_cast<double>(c.C);
    for (std::int64_t i = 0; i < c.C; ++i)
      var += std::pow(x[token * c.C + i] - mean, 2) / static_cast<double>(c.C);
    for (std::int64_t i = 0; i < c.C; ++i)
      y[token * c.C + i] = (x[token * c.C + i] - mean) / std::sqrt(var + 1e-6) *
                               (1 + m[(row * K + scale) * c.C + i]) +
                           m[(row * K + shift) * c.C + i];
  }
  return y;
}

class NormTest : public testing::TestWithParam<Case> {
 protected:
  std::unique_ptr<Arena> arena_ = Arena::reserve(std::size_t{1} << 30);
  ArenaScope scope_{*arena_};
};

TEST_P(NormTest, LayerNormModulate) {
  const Case c = GetParam();
  const int K = 6, shift = 3, scale = 4;
  const std::int64_t G = 2 * c.B, tokens = c.B * c.T * c.S;
  const Vec x = rounded(random_values(tokens * c.C, 1, 2.0), c.dtype);
  const Vec m = random_values(G * K * c.C, 2, 0.5),
            g = rounded(random_values(tokens * c.C, 3), c.dtype);
  Vec rows;
  for (std::int64_t f = 0; f < c.B * c.T; ++f)
    rows.push_back(static_cast<double>(f / c.T + (f % 3 == 1 ? c.B : 0)));
  const Shape shape{c.B, c.T, c.S, c.C};
  const Tensor tx = to_tensor(x, shape, c.dtype), tm = to_tensor(m, {G, K, c.C});
  const Tensor trows = to_tensor(rows, {c.B * c.T}, DType::i32);
  Tensor y = poisoned(shape, c.dtype), stats = poisoned({tokens, 2});
  ops::layer_norm_modulate_forward(tx, tm, trows, shift, scale, 0, y, stats);
  EXPECT_LT(relative_error(to_values(y), layer_norm_modulate(c, x, m, rows, K, shift, scale)),
            tolerance(c.dtype));

  const Tensor tg = to_tensor(g, shape, c.dtype);
  Tensor dx = poisoned(shape, c.dtype), dm = to_tensor(Vec(m.size(), 0.0), {G, K, c.C});
  ops::layer_norm_modulate_backward(tx, tm, trows, shift, scale, 0, stats, tg, dx, false, dm);
  const double bound = tolerance(c.dtype, 4e4);
  expect_gradient(
      [&](const Vec& v) { return dot(layer_norm_modulate(c, v, m, rows, K, shift, scale), g); }, x,
      to_values(dx), bound);
  expect_gradient(
      [&](const Vec& v) { return dot(layer_norm_modulate(c, x, v, rows, K, shift, scale), g); }, m,
      to_values(dm), 1e-4);

  // Accumulation adds to what is there.
  Tensor twice = to_tensor(to_values(dx), shape, c.dtype);
  Tensor dm2 = to_tensor(Vec(m.size(), 0.0), {G, K, c.C});
  ops::layer_norm_modulate_backward(tx, tm, trows, shift, scale, 0, stats, tg, twice, true, dm2);
  Vec doubled = to_values(dx);
  for (double& d : doubled) d *= 2;
  EXPECT_LT(relative_error(to_values(twice), doubled), tolerance(c.dtype));
}

TEST_P(NormTest, GateResidual) {
  const Case c = GetParam();
  const int K = 6, gate = 2;
  const std::int64_t n = c.B * c.T * c.S * c.C;
  const Vec x = rounded(random_values(n, 1), c.dtype), p = rounded(random_values(n, 2), c.dtype);
  const Vec m = random_values(c.B * K * c.C, 3), g = rounded(random_values(n, 4), c.dtype);
  Vec rows, keep;
  for (std::int64_t f = 0; f < c.B * c.T; ++f) rows.push_back(static_cast<double>(f / c.T));
  for (std::int64_t b = 0; b < c.B; ++b) keep.push_back(b == 0 ? 1.25 : 0.0);
  const auto reference = [&](const Vec& px, const Vec& mx) {
    Vec y(x.size());
    for (std::int64_t i = 0; i < n; ++i) {
      const std::int64_t b = i / (c.T * c.S * c.C);
      y[i] = x[i] + keep[b] * mx[(b * K + gate) * c.C + i % c.C] * px[i];
    }
    return y;
  };
  const Shape shape{c.B, c.T, c.S, c.C};
  const Tensor tx = to_tensor(x, shape, c.dtype), tp = to_tensor(p, shape, c.dtype);
  const Tensor tm = to_tensor(m, {c.B, K, c.C}), trows = to_tensor(rows, {c.B * c.T}, DType::i32);
  const Tensor tkeep = to_tensor(keep, {c.B});
  Tensor y = poisoned(shape, c.dtype);
  ops::gate_residual_forward(tx, tp, tm, trows, gate, tkeep, y);
  EXPECT_LT(relative_error(to_values(y), reference(p, m)), tolerance(c.dtype));
  Tensor dp = poisoned(shape, c.dtype), dm = to_tensor(Vec(m.size(), 0.0), {c.B, K, c.C});
  Tensor dbias = to_tensor(Vec(c.C, 1.0), {c.C});
  ops::gate_residual_backward(to_tensor(g, shape, c.dtype), tp, tm, trows, gate, tkeep, dp, dm,
                              dbias, true);
  Vec sums(c.C, 1.0);
  const Vec dps = to_values(dp);
  for (std::int64_t i = 0; i < n; ++i) sums[i % c.C] += dps[i];
  EXPECT_LT(relative_error(to_values(dbias), sums), 1e-5);
  expect_gradient([&](const Vec& v) { return dot(reference(v, m), g); }, p, to_values(dp),
                  tolerance(c.dtype, 1e4));
  expect_gradient([&](const Vec& v) { return dot(reference(p, v), g); }, m, to_values(dm), 1e-4);
}

INSTANTIATE_TEST_SUITE_P(
    Shapes, NormTest,
    testing::Values(Case{2, 3, 5, 64, DType::f32}, Case{1, 2, 130, 72, DType::f32},
                    Case{2, 4, 7, 20, DType::f32}, Case{2, 3, 65, 1152, DType::f32},
                    Case{2, 3, 5, 64, DType::bf16}, Case{1, 4, 70, 72, DType::bf16}));

// Frames whose row is below first_row are copied, forward and backward, and give their modulation
// row nothing.
TEST_F(OpTest, FramesBelowTheFirstRowPass) {
  const std::int64_t S = 67, C = 20, K = 2;
  const Case normalised{1, 2, S, C, DType::f32};
  for (const DType dtype : {DType::f32, DType::bf16}) {
    const Shape shape{4, S, C};
    const Vec x = rounded(random_values(shape.numel(), 1), dtype);
    const Vec g = rounded(random_values(shape.numel(), 2), dtype);
    const Vec m = random_values(4 * K * C, 3);
    const Tensor tx = to_tensor(x, shape, dtype), tg = to_tensor(g, shape, dtype);
    const Tensor tm = to_tensor(m, {4, K, C}), rows = to_tensor({2, 1, 0, 3}, {4}, DType::i32);
    Tensor y = poisoned(shape, dtype), stats = poisoned({4 * S, 2});
    ops::layer_norm_modulate_forward(tx, tm, rows, 0, 1, 2, y, stats);
    const auto frame = [&](const Vec& v, std::int64_t f) {
      return Vec(v.begin() + f * S * C, v.begin() + (f + 1) * S * C);
    };
    const auto outer = [&](const Vec& v) {  // frames 0 and 3, those that are normalised
      Vec both = frame(v, 0), last = frame(v, 3);
      both.insert(both.end(), last.begin(), last.end());
      return both;
    };
    const Vec ys = to_values(y);
    EXPECT_EQ(frame(ys, 1), frame(x, 1));
    EXPECT_EQ(frame(ys, 2), frame(x, 2));
    EXPECT_LT(
        relative_error(outer(ys), layer_norm_modulate(normalised, outer(x), m, {2, 3}, K, 0, 1)),
        tolerance(dtype));
    const Vec kept = to_values(stats);
    for (std::int64_t i = 2 * S; i < 6 * S; ++i) ASSERT_TRUE(std::isnan(kept[i]));
    for (const bool accumulate : {false, true}) {
      Tensor dx = to_tensor(Vec(x.size(), 1.0), shape, dtype);
      Tensor dm = to_tensor(Vec(m.size(), 0.0), {4, K, C});
      ops::layer_norm_modulate_backward(tx, tm, rows, 0, 1, 2, stats, tg, dx, accumulate, dm);
      Vec passed = frame(g, 1);
      for (double& v : passed) v += accumulate ? 1.0 : 0.0;
      EXPECT_EQ(frame(to_values(dx), 1), rounded(passed, dtype));
      const Vec d = to_values(dm);
      for (std::int64_t i = 0; i < 2 * K * C; ++i) EXPECT_EQ(d[i], 0.0);
      for (std::int64_t i = 0; i < C; ++i) {  // d shift of row 3
        double sum = 0;
        for (std::int64_t s = 0; s < S; ++s) sum += g[(3 * S + s) * C + i];
        EXPECT_NEAR(d[3 * K * C + i], sum, 1e-4);
      }
    }
  }
}

TEST_F(OpTest, ModulationForwardAndBackward) {
  const std::int64_t G = 3, K = 2, C = 20;
  for (const bool broadcast : {false, true}) {
    const std::int64_t columns = broadcast ? C : K * C;
    const Vec table = random_values(K * C, 1), t = random_values(G * columns, 2);
    const Vec g = random_values(G * K * C, 3);
    const auto reference = [&](const Vec& tab, const Vec& tt) {
      Vec m(static_cast<std::size_t>(G * K * C));
      for (std::int64_t i = 0; i < G * K * C; ++i) {
        const std::int64_t group = i / (K * C), inner = i % (K * C);
        m[i] = tab[inner] + tt[group * columns + (broadcast ? inner % C : inner)];
      }
      return m;
    };
    Tensor m = poisoned({G, K, C});
    ops::modulation_forward(to_tensor(table, {K, C}), to_tensor(t, {G, columns}), m);
    EXPECT_LT(relative_error(to_values(m), reference(table, t)), 1e-6);
    Tensor dtable = to_tensor(Vec(table.size(), 0.0), {K, C});
    Tensor dt = to_tensor(Vec(t.size(), 0.0), {G, columns});
    ops::modulation_backward(to_tensor(g, {G, K, C}), dtable, dt);
    expect_gradient([&](const Vec& v) { return dot(reference(v, t), g); }, table, to_values(dtable),
                    1e-5);
    expect_gradient([&](const Vec& v) { return dot(reference(table, v), g); }, t, to_values(dt),
                    1e-5);
  }
}

// Sums over tokens may not depend on the number of threads.
TEST_F(OpTest, ParameterGradientsAreTheSameForAnyThreadCount) {
  const Shape shape{2, 3, 333, 64};
  const Tensor x = to_tensor(random_values(shape.numel(), 1), shape);
  const Tensor g = to_tensor(random_values(shape.numel(), 2), shape);
  const Tensor m = to_tensor(random_values(2 * 2 * 64, 3), {2, 2, 64});
  const Tensor rows = to_tensor({0, 0, 0, 1, 1, 1}, {6}, DType::i32);
  Vec first;
  for (const int threads : {1, 2, 3}) {
    omp_set_num_threads(threads);
    Tensor y = poisoned(shape), stats = poisoned({1998, 2}), dx = poisoned(shape);
    Tensor dm = to_tensor(Vec(256, 0.0), {2, 2, 64});
    ops::layer_norm_modulate_forward(x, m, rows, 0, 1, 0, y, stats);
    ops::layer_norm_modulate_backward(x, m, rows, 0, 1, 0, stats, g, dx, false, dm);
    if (first.empty()) first = to_values(dm);
    EXPECT_EQ(first, to_values(dm));
  }
}

}  // namespace

namespace {

struct GroupCase {
  Shape x;  // [N, ..., C]
  int groups;
  bool silu;
  DType dtype = DType::f32;
};
constexpr double eps = 1e-6;

struct Moments {
  Vec mean, rstd;  // [N * groups]
};

Moments moments(const GroupCase& c, const Vec& x) {
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

Vec group_norm(const GroupCase& c, const Vec& x, const Vec& gamma, const Vec& beta) {
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

class GroupNormTest : public testing::TestWithParam<GroupCase> {
 protected:
  std::unique_ptr<Arena> arena_ = Arena::reserve(std::size_t{1} << 30);
  ArenaScope scope_{*arena_};
};

TEST_P(GroupNormTest, ForwardAndBackward) {
  const GroupCase c = GetParam();
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
INSTANTIATE_TEST_SUITE_P(
    Shapes, GroupNormTest,
    testing::Values(GroupCase{{2, 3, 5, 32}, 32, true}, GroupCase{{1, 2, 3, 7, 12}, 4, false},
                    GroupCase{{2, 17, 17, 64}, 8, true}, GroupCase{{1, 5, 128}, 4, true},
                    GroupCase{{3, 1, 1, 16}, 4, false}, GroupCase{{1, 4, 9, 17, 20}, 2, true},
                    GroupCase{{2, 5, 7, 32}, 8, true, DType::bf16},
                    GroupCase{{1, 270, 24}, 4, false, DType::bf16}));

// Values far from zero with a small spread: sums of squares would lose everything.
TEST_F(OpTest, GroupNormFarFromZero) {
  const GroupCase c{{1, 1000, 8}, 2, false};
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
