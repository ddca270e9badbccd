
#include "ops/attention.h"
#include "ops/matmul.h"
#include "reference.h"

namespace weft::test {
namespace {

// Cross attention of one sample as docs/models/stdit3.md, Cross attention, has it: projections,
// softmax, projection, without the output bias.
struct Problem {
  std::int64_t N, L, H, D;
  std::int64_t C() const { return H * D; }

  Vec forward(const Vec& x, const Vec& kv, const Vec& wq, const Vec& bq, const Vec& wo) const {
    const std::int64_t c = C();
    Vec y(static_cast<std::size_t>(N * c));
    for (std::int64_t n = 0; n < N; ++n) {
      Vec q(bq), o(static_cast<std::size_t>(c));
      for (std::int64_t i = 0; i < c; ++i)
        for (std::int64_t j = 0; j < c; ++j) q[i] += wq[i * c + j] * x[n * c + j];
      for (std::int64_t h = 0; h < H; ++h) {
        Vec p(static_cast<std::size_t>(L));
        double sum = 0;
        for (std::int64_t l = 0; l < L; ++l) {
          for (std::int64_t d = 0; d < D; ++d) p[l] += q[h * D + d] * kv[2 * l * c + h * D + d];
          sum += p[l] = std::exp(p[l] / std::sqrt(static_cast<double>(D)));
        }
        for (std::int64_t l = 0; l < L; ++l)
          for (std::int64_t d = 0; d < D; ++d)
            o[h * D + d] += p[l] / sum * kv[(2 * l + 1) * c + h * D + d];
      }
      for (std::int64_t i = 0; i < c; ++i)
        for (std::int64_t j = 0; j < c; ++j) y[n * c + i] += wo[i * c + j] * o[j];
    }
    return y;
  }
};

class Absorbed : public testing::TestWithParam<std::pair<Problem, DType>> {
 protected:
  std::unique_ptr<Arena> arena_ = Arena::reserve(std::size_t{1} << 30);
  ArenaScope scope_{*arena_};
};

TEST_P(Absorbed, IsCrossAttentionForwardAndBackward) {
  const auto [p, dtype] = GetParam();
  const std::int64_t N = p.N, L = p.L, H = p.H, D = p.D, C = p.C(), Lp = (L + 15) / 16 * 16;
  const Vec x = rounded(random_values(N * C, 1), dtype),
            kv = rounded(random_values(2 * L * C, 2), dtype);
  const Vec wq = random_values(C * C, 3, 0.1), wo = random_values(C * C, 4, 0.1);
  const Vec bq = random_values(C, 5, 0.3), g = rounded(random_values(N * C, 6), dtype);
  const Tensor tx = to_tensor(x, {N, C}, dtype), tkv = to_tensor(kv, {L, 2, H, D}, dtype);
  const Tensor tq = to_tensor(wq, {C, C}), to = to_tensor(wo, {C, C}), tb = to_tensor(bq, {C}),
               none;
  Tensor a = poisoned({H * Lp, C}, dtype), a0 = poisoned({H * Lp}),
         b = poisoned({C, H * Lp}, dtype);
  Tensor s = poisoned({N, H * Lp}, dtype), y = poisoned({N, C}, dtype);
  ops::absorb_forward(tkv, tq, tb, to, a, a0, b);
  ops::linear_forward(tx, a, a0, none, s);
  ops::head_softmax_forward(s, static_cast<int>(H), static_cast<int>(L));
  ops::linear_forward(s, b, none, none, y);
  EXPECT_LT(relative_error(to_values(y), p.forward(x, kv, wq, bq, wo)), tolerance(dtype, 4e3));

  const Tensor tg = to_tensor(g, {N, C}, dtype);
  Tensor dp = poisoned({N, H * Lp}, dtype), db = poisoned({C, H * Lp}), da = poisoned({H * Lp, C});
  Tensor da0 = poisoned({H * Lp}), dx = poisoned({N, C}, dtype), unused;
  ops::linear_backward_input(tg, b, dp, false);
  ops::linear_backward_weight(tg, s, db, unused, false);
  ops::head_softmax_backward(s, dp, static_cast<int>(H));
  ops::linear_backward_weight(dp, tx, da, da0, false);
  ops::linear_backward_input(dp, a, dx, false);
  Tensor dkv = poisoned({L, 2, H, D}, dtype), dwq = to_tensor(Vec(wq.size(), 1.0), {C, C});
  Tensor dbq = to_tensor(Vec(bq.size(), 1.0), {C}), dwo = to_tensor(Vec(wo.size(), 1.0), {C, C});
  ops::absorb_backward(tkv, tq, tb, to, da, da0, db, dkv, dwq, dbq, dwo);
  const auto added = [](const Tensor& t) {  // what came on top of the ones
    Vec v = to_values(t);
    for (double& e : v) e -= 1.0;
    return v;
  };
  const double bound = dtype == DType::bf16 ? 0.05 : 1e-4;
  expect_gradient([&](const Vec& v) { return dot(p.forward(v, kv, wq, bq, wo), g); }, x,
                  to_values(dx), bound);
  expect_gradient([&](const Vec& v) { return dot(p.forward(x, v, wq, bq, wo), g); }, kv,
                  to_values(dkv), bound);
  expect_gradient([&](const Vec& v) { return dot(p.forward(x, kv, v, bq, wo), g); }, wq, added(dwq),
                  bound);
  expect_gradient([&](const Vec& v) { return dot(p.forward(x, kv, wq, v, wo), g); }, bq, added(dbq),
                  bound);
  expect_gradient([&](const Vec& v) { return dot(p.forward(x, kv, wq, bq, v), g); }, wo, added(dwo),
                  bound);
}

INSTANTIATE_TEST_SUITE_P(Shapes, Absorbed,
                         testing::Values(std::pair{Problem{9, 5, 2, 40}, DType::f32},
                                         std::pair{Problem{7, 32, 2, 72}, DType::f32},
                                         std::pair{Problem{5, 2, 3, 16}, DType::f32},
                                         std::pair{Problem{9, 18, 2, 40}, DType::bf16}));

}  // namespace
}  // namespace weft::test
