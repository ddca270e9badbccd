#include "ops/attention.h"
#include "ops/matmul.h"
#include "reference.h"

namespace weft::test {
namespace {

struct Case {
  std::int64_t B, T, S, H, D;
  ops::Axis axis;
  bool norm, rope;
  DType dtype;
};

struct Problem {
  Case c;
  Vec wq, wk;
  Vec angles;  // [positions, D/2]

  std::int64_t length() const { return c.axis == ops::Axis::space ? c.S : c.T; }
  std::int64_t token(std::int64_t sequence, std::int64_t i) const {
    if (c.axis == ops::Axis::space) return sequence * c.S + i;
    return (sequence / c.S * c.T + i) * c.S + sequence % c.S;
  }

  // RMSNorm and rotation of one row, by the formulas of docs/models/stdit3.md, Self attention.
  Vec prepare(const double* x, const Vec& w, std::int64_t position) const {
    Vec y(x, x + c.D);
    if (c.norm) {
      double squares = 0;
      for (const double v : y) squares += v * v / static_cast<double>(c.D);
      for (std::int64_t i = 0; i < c.D; ++i) y[i] *= w[i] / std::sqrt(squares + 1e-6);
    }
    if (c.rope)
      for (std::int64_t i = 0; i < c.D / 2; ++i) {
        const double a = angles[position * (c.D / 2) + i], x0 = y[2 * i], x1 = y[2 * i + 1];
        y[2 * i] = x0 * std::cos(a) - x1 * std::sin(a);
        y[2 * i + 1] = x1 * std::cos(a) + x0 * std::sin(a);
      }
    return y;
  }

  Vec forward(const Vec& qkv, const Vec& q_weight, const Vec& k_weight) const {
    const std::int64_t n = length(), sequences = c.B * c.T * c.S / n, C = c.H * c.D;
    Vec out(static_cast<std::size_t>(c.B * c.T * c.S * C));
    for (std::int64_t s = 0; s < sequences; ++s)
      for (std::int64_t h = 0; h < c.H; ++h) {
        std::vector<Vec> q, k;
        for (std::int64_t i = 0; i < n; ++i) {
          const double* row = qkv.data() + token(s, i) * 3 * C + h * c.D;
          q.push_back(prepare(row, q_weight, i));
          k.push_back(prepare(row + C, k_weight, i));
        }
        for (std::int64_t i = 0; i < n; ++i) {
          Vec p(static_cast<std::size_t>(n));
          double max = -1e300, sum = 0;
          for (std::int64_t j = 0; j < n; ++j)
            max = std::max(max, p[j] = dot(q[i], k[j]) / std::sqrt(static_cast<double>(c.D)));
          for (double& v : p) sum += v = std::exp(v - max);
          for (std::int64_t j = 0; j < n; ++j)
            for (std::int64_t d = 0; d < c.D; ++d)
              out[token(s, i) * C + h * c.D + d] +=
                  p[j] / sum * qkv[token(s, j) * 3 * C + 2 * C + h * c.D + d];
        }
      }
    return out;
  }
};

class SelfAttention : public testing::TestWithParam<Case> {
 protected:
  std::unique_ptr<Arena> arena_ = Arena::reserve(std::size_t{1} << 30);
  ArenaScope scope_{*arena_};
};

TEST_P(SelfAttention, MatchesReferenceAndFiniteDifferences) {
  const Case c = GetParam();
  Problem p{c, random_values(c.D, 1), random_values(c.D, 2), {}};
  const std::int64_t n = p.length(), C = c.H * c.D, tokens = c.B * c.T * c.S;
  const Shape shape{c.B, c.T, c.S, 3, c.H, c.D}, out_shape{c.B, c.T, c.S, C};
  Tensor rope;
  if (c.rope) {
    rope = Tensor::empty({n, c.D / 2, 2}, DType::f32);
    for (std::int64_t i = 0; i < n * c.D / 2; ++i) {
      const double angle =
          static_cast<double>(i / (c.D / 2)) *
          std::pow(100.0, -2.0 * static_cast<double>(i % (c.D / 2)) / static_cast<double>(c.D));
      p.angles.push_back(angle);
      rope.data<float>()[2 * i] = static_cast<float>(std::cos(angle));
      rope.data<float>()[2 * i + 1] = static_cast<float>(std::sin(angle));
    }
  }
  const Vec qkv = rounded(random_values(tokens * 3 * C, 3), c.dtype);
  const Vec g = rounded(random_values(tokens * C, 4), c.dtype);
  const Tensor tqkv = to_tensor(qkv, shape, c.dtype);
  const Tensor wq = c.norm ? to_tensor(p.wq, {c.D}) : Tensor();
  const Tensor wk = c.norm ? to_tensor(p.wk, {c.D}) : Tensor();
  Tensor out = poisoned(out_shape, c.dtype), lse = poisoned({tokens * c.H});
  Tensor no_qk;
  ops::self_attention_forward(tqkv, wq, wk, rope, c.axis, out, lse, no_qk);
  EXPECT_LT(relative_error(to_values(out), p.forward(qkv, p.wq, p.wk)), tolerance(c.dtype, 1000));

  Tensor dqkv = poisoned(shape, c.dtype);
  Tensor dwq = c.norm ? to_tensor(Vec(p.wq.size(), 0.0), {c.D}) : Tensor();
  Tensor dwk = c.norm ? to_tensor(Vec(p.wk.size(), 0.0), {c.D}) : Tensor();
  ops::self_attention_backward(tqkv, wq, wk, rope, c.axis, out, lse,
                               to_tensor(g, out_shape, c.dtype), dqkv, dwq, dwk, no_qk);
  const double bound = c.dtype == DType::bf16 ? 0.03 : 1e-4;
  expect_gradient([&](const Vec& v) { return dot(p.forward(v, p.wq, p.wk), g); }, qkv,
                  to_values(dqkv), bound);
  if (!c.norm) return;
  if (n == 1) {  // one key takes all: its q and k have no say
    for (const double d : to_values(dwq)) EXPECT_NEAR(d, 0, 1e-6);
    return;
  }
  expect_gradient([&](const Vec& v) { return dot(p.forward(qkv, v, p.wk), g); }, p.wq,
                  to_values(dwq), bound);
  expect_gradient([&](const Vec& v) { return dot(p.forward(qkv, p.wq, v), g); }, p.wk,
                  to_values(dwk), bound);
}

constexpr auto space = ops::Axis::space, time_axis = ops::Axis::time;
INSTANTIATE_TEST_SUITE_P(Shapes, SelfAttention,
                         testing::Values(Case{1, 2, 37, 2, 16, space, true, false, DType::f32},
                                         Case{2, 1, 110, 1, 72, space, true, false, DType::f32},
                                         Case{1, 1, 200, 1, 64, space, false, false, DType::f32},
                                         Case{1, 1, 1, 2, 8, space, true, false, DType::f32},
                                         Case{2, 5, 6, 2, 72, time_axis, true, true, DType::f32},
                                         Case{1, 17, 3, 2, 10, time_axis, true, true, DType::f32},
                                         Case{1, 120, 1, 1, 24, time_axis, true, true, DType::f32},
                                         Case{1, 2, 37, 2, 16, space, true, false, DType::bf16},
                                         Case{2, 5, 6, 2, 72, time_axis, true, true, DType::bf16}));

#ifdef __x86_64__
// Both instruction sets give the same results up to rounding.
TEST_F(OpTest, SelfAttentionAgreesBetweenInstructionSets) {
  if (!ops::cpu_is_v4()) GTEST_SKIP() << "this processor has no AVX-512";
  const Shape shape{1, 2, 50, 3, 2, 72}, out_shape{1, 2, 50, 144};
  const Tensor qkv = to_tensor(random_values(shape.numel(), 1), shape);
  const Tensor w = to_tensor(random_values(72, 2), {72});
  Tensor none;
  Tensor a = poisoned(out_shape), b = poisoned(out_shape), lse = poisoned({200});
  ops::cpu_v3::self_attention_forward(qkv, w, w, none, ops::Axis::space, a, lse, none);
  ops::cpu_v4::self_attention_forward(qkv, w, w, none, ops::Axis::space, b, lse, none);
  EXPECT_LT(relative_error(to_values(a), to_values(b)), 1e-5);
}
#endif

}  // namespace

namespace {

// Cross attention of one sample as docs/models/stdit3.md, Cross attention, has it: projections,
// softmax, projection, without the output bias.
struct AbsorbedProblem {
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

class Absorbed : public testing::TestWithParam<std::pair<AbsorbedProblem, DType>> {
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
                         testing::Values(std::pair{AbsorbedProblem{9, 5, 2, 40}, DType::f32},
                                         std::pair{AbsorbedProblem{7, 32, 2, 72}, DType::f32},
                                         std::pair{AbsorbedProblem{5, 2, 3, 16}, DType::f32},
                                         std::pair{AbsorbedProblem{9, 18, 2, 40}, DType::bf16}));

}  // namespace

namespace {

// The bucket by the original's formula (docs/models/t5.md, Position bias).
int bucket(int distance) {
  const int n = std::abs(distance), offset = distance > 0 ? 16 : 0;
  if (n < 8) return offset + n;
  const double log = std::log(static_cast<float>(n) / 8.0f);
  return offset + std::min(15, 8 + static_cast<int>(log / std::log(16.0) * 8));
}

TEST(RelativeBucket, FollowsTheFormulaAtEveryDistance) {
  for (int d = -400; d <= 400; ++d) EXPECT_EQ(ops::relative_bucket(d), bucket(d)) << d;
  EXPECT_EQ(ops::relative_bucket(91), 31);
  EXPECT_EQ(ops::relative_bucket(-90), 14);
}

}  // namespace
}  // namespace weft::test
