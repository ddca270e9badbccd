#include <omp.h>

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

Vec cross_reference(const Vec& q, const Vec& kv, const Vec& offsets, std::int64_t B, std::int64_t N,
                    std::int64_t H, std::int64_t D) {
  const std::int64_t C = H * D;
  Vec out(q.size());
  for (std::int64_t b = 0; b < B; ++b)
    for (std::int64_t i = 0; i < N; ++i)
      for (std::int64_t h = 0; h < H; ++h) {
        const auto first = static_cast<std::int64_t>(offsets[b]);
        const auto last = static_cast<std::int64_t>(offsets[b + 1]);
        Vec p;
        double max = -1e300, sum = 0;
        for (std::int64_t j = first; j < last; ++j) {
          double s = 0;
          for (std::int64_t d = 0; d < D; ++d)
            s += q[(b * N + i) * C + h * D + d] * kv[j * 2 * C + h * D + d];
          p.push_back(s / std::sqrt(static_cast<double>(D)));
          max = std::max(max, p.back());
        }
        for (double& v : p) sum += v = std::exp(v - max);
        for (std::int64_t j = first; j < last; ++j)
          for (std::int64_t d = 0; d < D; ++d)
            out[(b * N + i) * C + h * D + d] += p[j - first] / sum * kv[j * 2 * C + C + h * D + d];
      }
  return out;
}

TEST_F(OpTest, CrossAttentionOverPackedCaptions) {
  // Captions of 5, 0 and 33 tokens: one sample sees nothing and gets zeros. Two rows of padding
  // follow.
  const std::int64_t B = 3, N = 21, H = 2;
  const Vec offsets = {0, 5, 5, 38};
  for (const std::int64_t D : {8, 72})
    for (const DType dtype : {DType::f32, DType::bf16}) {
      const std::int64_t C = H * D;
      const Vec q = rounded(random_values(B * N * C, 1), dtype);
      const Vec kv = rounded(random_values(40 * 2 * C, 2), dtype);
      const Vec g = rounded(random_values(B * N * C, 3), dtype);
      const Tensor tq = to_tensor(q, {B, N, C}, dtype), tkv = to_tensor(kv, {40, 2, H, D}, dtype);
      const Tensor toff = to_tensor(offsets, {4}, DType::i32);
      Tensor out = poisoned({B, N, C}, dtype), lse = poisoned({B * H * N});
      ops::cross_attention_forward(tq, tkv, toff, static_cast<int>(H), out, lse);
      EXPECT_LT(relative_error(to_values(out), cross_reference(q, kv, offsets, B, N, H, D)),
                tolerance(dtype, 1000));
      Tensor dq = poisoned({B, N, C}, dtype), dkv = poisoned({40, 2, H, D}, dtype);
      ops::cross_attention_backward(tq, tkv, toff, static_cast<int>(H), out, lse,
                                    to_tensor(g, {B, N, C}, dtype), dq, dkv);
      const double bound = dtype == DType::bf16 ? 0.03 : 1e-4;
      expect_gradient(
          [&](const Vec& v) { return dot(cross_reference(v, kv, offsets, B, N, H, D), g); }, q,
          to_values(dq), bound);
      expect_gradient(
          [&](const Vec& v) { return dot(cross_reference(q, v, offsets, B, N, H, D), g); }, kv,
          to_values(dkv), bound);
      const Vec d = to_values(dkv);
      for (std::int64_t i = 38 * 2 * C; i < 40 * 2 * C; ++i) ASSERT_EQ(d[i], 0.0);
    }
}

TEST_F(OpTest, AttentionGradientsAreTheSameForAnyThreadCount) {
  const Shape shape{1, 3, 40, 3, 2, 16}, out_shape{1, 3, 40, 32};
  const Tensor qkv = to_tensor(random_values(shape.numel(), 1), shape);
  const Tensor g = to_tensor(random_values(out_shape.numel(), 2), out_shape);
  const Tensor w = to_tensor(random_values(16, 3), {16});
  Tensor none;
  Vec first;
  for (const int threads : {1, 2, 3}) {
    omp_set_num_threads(threads);
    Tensor out = poisoned(out_shape), lse = poisoned({240}), dqkv = poisoned(shape);
    Tensor dwq = to_tensor(Vec(16, 0.0), {16}), dwk = to_tensor(Vec(16, 0.0), {16});
    ops::self_attention_forward(qkv, w, w, none, ops::Axis::space, out, lse, none);
    ops::self_attention_backward(qkv, w, w, none, ops::Axis::space, out, lse, g, dqkv, dwq, dwk,
                                 none);
    if (first.empty()) first = to_values(dwq);
    EXPECT_EQ(first, to_values(dwq));
  }
}

TEST_F(OpTest, WideAttention) {
  struct Sizes {
    std::int64_t N, P, C;
    DType dtype;
  };
  for (const Sizes& s : {Sizes{2, 5, 6, DType::f32}, Sizes{1, 9, 40, DType::f32},
                         Sizes{1, 600, 20, DType::f32}, Sizes{2, 7, 16, DType::bf16}}) {
    const Shape shape{s.N, s.P, 3, s.C};
    const auto reference = [&](const Vec& v) {
      Vec out(static_cast<std::size_t>(s.N * s.P * s.C)), p(static_cast<std::size_t>(s.P));
      const auto at = [&](std::int64_t n, std::int64_t i, int which) {
        return v.data() + ((n * s.P + i) * 3 + which) * s.C;
      };
      for (std::int64_t n = 0; n < s.N; ++n)
        for (std::int64_t i = 0; i < s.P; ++i) {
          double sum = 0;
          for (std::int64_t j = 0; j < s.P; ++j) {
            double d = 0;
            for (std::int64_t c = 0; c < s.C; ++c) d += at(n, i, 0)[c] * at(n, j, 1)[c];
            sum += p[j] = std::exp(d / std::sqrt(static_cast<double>(s.C)));
          }
          for (std::int64_t j = 0; j < s.P; ++j)
            for (std::int64_t c = 0; c < s.C; ++c)
              out[(n * s.P + i) * s.C + c] += p[j] / sum * at(n, j, 2)[c];
        }
      return out;
    };
    const Vec x = rounded(random_values(shape.numel(), 1), s.dtype);
    const Vec g = rounded(random_values(s.N * s.P * s.C, 2), s.dtype);
    const Tensor qkv = to_tensor(x, shape, s.dtype);
    Tensor out = poisoned({s.N, s.P, s.C}, s.dtype), lse = poisoned({s.N, s.P});
    ops::wide_attention_forward(qkv, out, lse);
    EXPECT_LT(relative_error(to_values(out), reference(x)), tolerance(s.dtype));
    Tensor dqkv = poisoned(shape, s.dtype);
    ops::wide_attention_backward(qkv, out, lse, to_tensor(g, {s.N, s.P, s.C}, s.dtype), dqkv);
    if (s.P < 100)
      expect_gradient([&](const Vec& v) { return dot(reference(v), g); }, x, to_values(dqkv),
                      tolerance(s.dtype, 1e4));
    // Many tiles of queries: along a direction, which is one difference.
    Vec up = x, down = x;
    const Vec d = random_values(shape.numel(), 3);
    for (std::size_t i = 0; i < x.size(); ++i) up[i] += 1e-5 * d[i], down[i] -= 1e-5 * d[i];
    const double slope = (dot(reference(up), g) - dot(reference(down), g)) / 2e-5;
    const Vec got = to_values(dqkv);
    EXPECT_NEAR(dot(got, d), slope, tolerance(s.dtype, 1e4) * std::sqrt(dot(got, got)));
  }
}

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

struct RelativeCase {
  std::vector<std::int64_t> lengths;  // of the captions, in tokens
  std::int64_t H, D;
  DType dtype;
};

class RelativeAttention : public testing::TestWithParam<RelativeCase> {
 protected:
  std::unique_ptr<Arena> arena_ = Arena::reserve(std::size_t{1} << 28);
  ArenaScope scope_{*arena_};
};

// softmax(q k^T + bias[bucket(key - query)]) v of every caption by itself, in f64.
Vec reference(const RelativeCase& c, const Vec& qkv, const Vec& bias) {
  const std::int64_t C = c.H * c.D, rows = static_cast<std::int64_t>(qkv.size()) / (3 * C);
  Vec out(static_cast<std::size_t>(rows * C));
  std::int64_t first = 0;
  for (const std::int64_t n : c.lengths) {
    for (std::int64_t h = 0; h < c.H; ++h)
      for (std::int64_t i = 0; i < n; ++i) {
        const auto row = [&](int part, std::int64_t t) {
          return qkv.data() + (part * rows + first + t) * C + h * c.D;
        };
        Vec p(static_cast<std::size_t>(n));
        double max = -1e300, sum = 0;
        for (std::int64_t j = 0; j < n; ++j) {
          p[j] = bias[bucket(static_cast<int>(j - i)) * c.H + h];
          for (std::int64_t d = 0; d < c.D; ++d) p[j] += row(0, i)[d] * row(1, j)[d];
          max = std::max(max, p[j]);
        }
        for (double& v : p) sum += v = std::exp(v - max);
        for (std::int64_t j = 0; j < n; ++j)
          for (std::int64_t d = 0; d < c.D; ++d)
            out[(first + i) * C + h * c.D + d] += p[j] / sum * row(2, j)[d];
      }
    first += n;
  }
  return out;
}

TEST_P(RelativeAttention, MatchesTheFormula) {
  const RelativeCase c = GetParam();
  Vec offsets{0};
  std::int64_t longest = 0;
  for (const std::int64_t n : c.lengths) {
    offsets.push_back(offsets.back() + static_cast<double>(n));
    longest = std::max(longest, n);
  }
  const auto rows = static_cast<std::int64_t>(offsets.back());
  // Scores are not scaled: small values keep the softmax from being decided by one key.
  const Vec qkv = rounded(random_values(3 * rows * c.H * c.D, 1, 0.5), c.dtype);
  const Vec bias = random_values(32 * c.H, 2);
  const Tensor tqkv = to_tensor(qkv, {3, rows, c.H, c.D}, c.dtype),
               tbias = to_tensor(bias, {32, c.H});
  const Tensor toffsets =
      to_tensor(offsets, {static_cast<std::int64_t>(offsets.size())}, DType::i32);
  const Vec wanted = reference(c, qkv, bias);
  Tensor out = poisoned({rows, c.H * c.D}, c.dtype);
  ops::relative_attention_forward(tqkv, tbias, toffsets, longest, out);
  EXPECT_LT(relative_error(to_values(out), wanted), tolerance(c.dtype, 1e4));

  // A bound above the longest caption changes no bit, nor does the number of threads.
  Tensor again = poisoned(out.shape(), c.dtype);
  const int threads = omp_get_max_threads();
  omp_set_num_threads(1);
  ops::relative_attention_forward(tqkv, tbias, toffsets, longest + 9, again);
  omp_set_num_threads(threads);
  EXPECT_EQ(to_values(again), to_values(out));
}

INSTANTIATE_TEST_SUITE_P(Shapes, RelativeAttention,
                         testing::Values(RelativeCase{{1}, 2, 64, DType::f32},
                                         RelativeCase{{5, 1, 17, 2}, 6, 64, DType::f32},
                                         RelativeCase{{130, 33}, 2, 64, DType::f32},
                                         RelativeCase{{7, 20}, 3, 20, DType::f32},
                                         RelativeCase{{9, 0, 40}, 2, 8, DType::f32},
                                         RelativeCase{{11, 100}, 2, 64, DType::bf16},
                                         RelativeCase{{12, 3}, 2, 20, DType::bf16}));

}  // namespace
}  // namespace weft::test
