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
