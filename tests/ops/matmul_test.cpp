#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <dnnl.hpp>
#include <map>
#include <utility>

#include "ops/matmul.h"
#include "reference.h"

namespace weft::test {
namespace {

struct Case {
  std::int64_t m, n, k;
  DType dtype;
};

class Linear : public testing::TestWithParam<Case> {
 protected:
  std::unique_ptr<Arena> arena_ = Arena::reserve(std::size_t{1} << 30);
  ArenaScope scope_{*arena_};
};

// y = x w^T + b + r.
Vec reference(const Case& c, const Vec& x, const Vec& w, const Vec& b, const Vec& r) {
  Vec y(static_cast<std::size_t>(c.m * c.n));
  for (std::int64_t i = 0; i < c.m; ++i)
    for (std::int64_t j = 0; j < c.n; ++j) {
      double s = (b.empty() ? 0 : b[j]) + (r.empty() ? 0 : r[i * c.n + j]);
      for (std::int64_t q = 0; q < c.k; ++q) s += x[i * c.k + q] * w[j * c.k + q];
      y[i * c.n + j] = s;
    }
  return y;
}

TEST_P(Linear, ForwardAndBackward) {
  const Case c = GetParam();
  const Vec x = rounded(random_values(c.m * c.k, 1), c.dtype);
  const Vec w = rounded(random_values(c.n * c.k, 2), c.dtype);
  const Vec b = random_values(c.n, 3), r = rounded(random_values(c.m * c.n, 4), c.dtype);
  const Vec g = rounded(random_values(c.m * c.n, 5), c.dtype);
  const Tensor tx = to_tensor(x, {c.m, c.k}, c.dtype), tw = to_tensor(w, {c.n, c.k}, c.dtype);
  const Tensor tb = to_tensor(b, {c.n}), tr = to_tensor(r, {c.m, c.n}, c.dtype), none;
  const double bound = tolerance(c.dtype, static_cast<double>(c.k));
  for (const bool bias : {false, true})
    for (const bool residual : {false, true}) {
      Tensor y = poisoned({c.m, c.n}, c.dtype);
      ops::linear_forward(tx, tw, bias ? tb : none, residual ? tr : none, y);
      EXPECT_LT(
          relative_error(to_values(y), reference(c, x, w, bias ? b : Vec{}, residual ? r : Vec{})),
          bound)
          << "bias " << bias << " residual " << residual;
    }

  // dx = g w, dw = g^T x, db = column sums of g: each once written and once added to what was
  // there.
  Vec dx(x.size()), dw(w.size()), db(b.size());
  for (std::int64_t i = 0; i < c.m; ++i)
    for (std::int64_t j = 0; j < c.n; ++j) {
      db[j] += g[i * c.n + j];
      for (std::int64_t q = 0; q < c.k; ++q) {
        dx[i * c.k + q] += g[i * c.n + j] * w[j * c.k + q];
        dw[j * c.k + q] += g[i * c.n + j] * x[i * c.k + q];
      }
    }
  const Tensor tg = to_tensor(g, {c.m, c.n}, c.dtype);
  Tensor tdx = poisoned({c.m, c.k}, c.dtype), tdw = poisoned({c.n, c.k}), tdb = poisoned({c.n});
  for (const double times : {1.0, 2.0}) {
    ops::linear_backward_input(tg, tw, tdx, times > 1);
    ops::linear_backward_weight(tg, tx, tdw, tdb, times > 1);
    const auto scaled = [&](Vec v) {
      for (double& e : v) e *= times;
      return v;
    };
    EXPECT_LT(relative_error(to_values(tdx), scaled(dx)),
              tolerance(c.dtype, static_cast<double>(c.n)));
    EXPECT_LT(relative_error(to_values(tdw), scaled(dw)),
              tolerance(DType::f32, 4.0 * static_cast<double>(c.m)));
    EXPECT_LT(relative_error(to_values(tdb), scaled(db)),
              tolerance(DType::f32, 4.0 * static_cast<double>(c.m)));
  }
}

INSTANTIATE_TEST_SUITE_P(
    Shapes, Linear,
    testing::Values(Case{1, 1, 1, DType::f32}, Case{7, 5, 3, DType::f32},
                    Case{130, 96, 48, DType::f32}, Case{257, 65, 33, DType::f32},
                    Case{2, 384, 64, DType::f32}, Case{1050, 128, 40, DType::f32},
                    Case{64, 128, 256, DType::bf16}, Case{33, 24, 40, DType::bf16}));

// The two fused forms against the same steps in f64.
TEST_P(Linear, WithGelu) {
  const Case c = GetParam();
  const Vec x = rounded(random_values(c.m * c.k, 1), c.dtype);
  const Vec w = rounded(random_values(c.n * c.k, 2, 1 / std::sqrt(double(c.k))), c.dtype);
  const Vec b = random_values(c.n, 3);
  const auto gelu = [](double v) {
    return 0.5 * v * (1 + std::tanh(std::sqrt(2 / M_PI) * (v + 0.044715 * v * v * v)));
  };
  const Vec expected_z = reference(c, x, w, b, {});
  Vec expected_h;
  for (const double v : expected_z) expected_h.push_back(gelu(v));
  const Tensor tx = to_tensor(x, {c.m, c.k}, c.dtype), tw = to_tensor(w, {c.n, c.k}, c.dtype);
  Tensor z = poisoned({c.m, c.n}, c.dtype), h = poisoned({c.m, c.n}, c.dtype);
  ops::linear_gelu_forward(tx, tw, to_tensor(b, {c.n}), z, h);
  const double bound = tolerance(c.dtype, 64.0 * static_cast<double>(c.k));
  EXPECT_LT(relative_error(to_values(z), expected_z), bound);
  EXPECT_LT(relative_error(to_values(h), expected_h), bound);
  ops::linear_gelu_forward(tx, tw, to_tensor(b, {c.n}), z, z);
  EXPECT_EQ(to_values(z), to_values(h));

  // dz [m,k] from dy [m,n] through w [n,k], at the pre-activations x.
  const Vec dy = rounded(random_values(c.m * c.n, 4), c.dtype);
  Vec dz(x.size());
  for (std::int64_t i = 0; i < c.m; ++i)
    for (std::int64_t q = 0; q < c.k; ++q) {
      double s = 0;
      for (std::int64_t j = 0; j < c.n; ++j) s += dy[i * c.n + j] * w[j * c.k + q];
      const double v = x[i * c.k + q], e = 1e-6;
      dz[i * c.k + q] = s * (gelu(v + e) - gelu(v - e)) / (2 * e);
    }
  Tensor tz = to_tensor(x, {c.m, c.k}, c.dtype), tdz = poisoned({c.m, c.k}, c.dtype);
  const Vec before = random_values(c.k, 5);
  Tensor sums = to_tensor(before, {c.k});
  ops::linear_gelu_backward_input(to_tensor(dy, {c.m, c.n}, c.dtype), tw, tz, tdz, tz, sums, true);
  EXPECT_LT(relative_error(to_values(tdz), dz),
            tolerance(c.dtype, 64.0 * static_cast<double>(c.n)));
  const Vec again = to_values(tz), stored = to_values(tdz);
  for (std::size_t i = 0; i < x.size(); ++i)
    ASSERT_NEAR(again[i], gelu(x[i]), c.dtype == DType::bf16 ? 0.02 : 1e-5);
  Vec expected_sums = before;
  for (std::size_t i = 0; i < stored.size(); ++i) expected_sums[i % before.size()] += stored[i];
  EXPECT_LT(relative_error(to_values(sums), expected_sums),
            tolerance(DType::f32, 4.0 * static_cast<double>(c.m)));
}

TEST_F(OpTest, LinearOfNoRowsLeavesZeroGradients) {
  Tensor dy = Tensor::empty({0, 4}, DType::f32), x = Tensor::empty({0, 3}, DType::f32);
  Tensor dw = poisoned({4, 3}), db = poisoned({4});
  ops::linear_backward_weight(dy, x, dw, db, false);
  EXPECT_EQ(to_values(dw), Vec(12, 0.0));
  EXPECT_EQ(to_values(db), Vec(4, 0.0));
}

}  // namespace

namespace {

struct PackedCase {
  std::int64_t m, n, k;
};

class Packed : public testing::TestWithParam<PackedCase> {
 protected:
  std::unique_ptr<Arena> arena_ = Arena::reserve(std::size_t{1} << 30);
  ArenaScope scope_{*arena_};
};

TEST_P(Packed, ProductWithBiasAndResidual) {
  const PackedCase c = GetParam();
  const Vec x = rounded(random_values(c.m * c.k, 1), DType::f32);
  const Vec w = rounded(random_values(c.n * c.k, 2), DType::f32);
  const Vec b = random_values(c.n, 3), r = random_values(c.m * c.n, 4);
  Vec plain(r.size());
  for (std::int64_t i = 0; i < c.m; ++i)
    for (std::int64_t j = 0; j < c.n; ++j)
      for (std::int64_t q = 0; q < c.k; ++q) plain[i * c.n + j] += x[i * c.k + q] * w[j * c.k + q];
  Tensor weight = to_tensor(w, {c.n, c.k}), rows = poisoned({ops::packed_rows(c.m), c.k});
  ops::pack_weight(weight);
  ops::pack_rows(to_tensor(x, {c.m, c.k}), rows);
  const double bound = tolerance(DType::f32, static_cast<double>(c.k));
  for (const bool bias : {false, true})
    for (const bool residual : {false, true}) {
      Vec wanted = plain;
      for (std::size_t i = 0; i < wanted.size(); ++i)
        wanted[i] += (bias ? b[i % std::size_t(c.n)] : 0) + (residual ? r[i] : 0);
      const Tensor tb = bias ? to_tensor(b, {c.n}) : Tensor();
      const Tensor tr = residual ? to_tensor(r, {c.m, c.n}) : Tensor();
      Tensor y = poisoned({c.m, c.n});
      ops::packed_linear_forward(rows, weight, tb, tr, y);
      EXPECT_LT(relative_error(to_values(y), wanted), bound) << bias << residual;
      if (!residual) continue;
      Tensor over = to_tensor(r, {c.m, c.n});
      ops::packed_linear_forward(rows, weight, tb, over, over);
      EXPECT_EQ(to_values(over), to_values(y));
    }
}

// One row, whole and broken tiles, panels and blocks of K, more than a block of rows.
INSTANTIATE_TEST_SUITE_P(Shapes, Packed,
                         testing::Values(PackedCase{1, 1, 1}, PackedCase{7, 5, 3},
                                         PackedCase{6, 64, 512}, PackedCase{13, 70, 33},
                                         PackedCase{18, 384, 64}, PackedCase{5, 200, 1100},
                                         PackedCase{490, 131, 520}));

// A caption's features must not depend on what else is in its batch.
TEST_F(OpTest, PackedRowsDoNotSeeEachOther) {
  const std::int64_t m = 20, n = 96, k = 700;
  const Vec x = random_values(m * k, 1);
  Tensor weight = to_tensor(random_values(n * k, 2), {n, k});
  ops::pack_weight(weight);
  const auto product = [&](std::int64_t first, std::int64_t last) {
    Tensor rows = poisoned({ops::packed_rows(last - first), k}), y = poisoned({last - first, n});
    ops::pack_rows(to_tensor(x, {m, k}).slice(first, last), rows);
    ops::packed_linear_forward(rows, weight, Tensor(), Tensor(), y);
    return to_values(y);
  };
  const Vec all = product(0, m), some = product(9, 14);
  EXPECT_EQ(some, Vec(all.begin() + 9 * n, all.begin() + 14 * n));
}

}  // namespace

// The store of what oneDNN makes (src/ops/cpu/onednn.h).
namespace {

#include "ops/cpu/onednn.h"

TEST(Recent, KeepsWhatWasUsedLast) {
  Recent<int, int> kept;
  int made = 0;
  const auto get = [&](int key) {
    return kept.get(key, [&] {
      ++made;
      return 2 * key;
    });
  };
  constexpr int many = 2000;
  for (int key = 1; key <= many; ++key) {
    EXPECT_EQ(get(key), 2 * key);
    EXPECT_EQ(get(0), 0);  // in use all the time
  }
  EXPECT_EQ(made, many + 1);
  for (int key = many - 100; key <= many; ++key) get(key);
  EXPECT_EQ(made, many + 1);  // all there still
  get(1);
  EXPECT_EQ(made, many + 2);  // dropped long ago
}

}  // namespace
}  // namespace weft::test
