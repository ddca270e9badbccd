#include "ops/optimizer.h"

#include <cstring>
#include <limits>
#include <vector>

#include "reference.h"

namespace weft::test {
namespace {

TEST_F(OpTest, SumOfSquares) {
  const Vec x = random_values(100003, 1);
  Tensor sum = Tensor::empty({1}, DType::f64);
  ops::sum_of_squares(to_tensor(x, {100003}), sum, false);
  EXPECT_NEAR(sum.data<double>()[0], dot(x, x), 1e-5 * dot(x, x));
  ops::sum_of_squares(to_tensor({3, 4}, {2}), sum, true);
  EXPECT_NEAR(sum.data<double>()[0], dot(x, x) + 25, 1e-5 * dot(x, x));
  Vec bad = x;
  bad[77777] = std::nan("");
  ops::sum_of_squares(to_tensor(bad, {100003}), sum, false);
  EXPECT_FALSE(std::isfinite(sum.data<double>()[0]));
  Tensor values = Tensor::empty({700}, DType::f64);
  std::fill_n(values.data<double>(), 700, 2.0);
  ops::carry_non_finite(values, sum);
  EXPECT_FALSE(std::isfinite(sum.data<double>()[0])) << "what was not finite stays so";
  sum.data<double>()[0] = 7;
  ops::carry_non_finite(values, sum);
  EXPECT_EQ(sum.data<double>()[0], 0);
  values.data<double>()[350] = std::numeric_limits<double>::infinity();
  ops::carry_non_finite(values, sum);
  EXPECT_FALSE(std::isfinite(sum.data<double>()[0]));
}

// Equal bits give equal sums, a single changed bit never does.
TEST_F(OpTest, ChecksumSeesEveryBit) {
  const Vec x = random_values(100002, 1);
  Tensor t = to_tensor(x, {100002});
  Tensor sum = Tensor::empty({2}, DType::f64), other = Tensor::empty({2}, DType::f64);
  ops::checksum(t, sum);
  ops::checksum(to_tensor(x, {100002}), other);
  const double* a = sum.data<double>();
  const double* b = other.data<double>();
  EXPECT_EQ(a[0], b[0]);
  EXPECT_EQ(a[1], b[1]);
  EXPECT_EQ(a[0], std::floor(a[0]));
  EXPECT_LT(a[0], 4294967296.0);
  for (const std::int64_t at : {0, 1, 77777, 100001})
    for (const int bit : {0, 13, 31}) {
      std::uint32_t word;
      std::memcpy(&word, t.data<float>() + at, 4);
      const std::uint32_t flipped = word ^ 1u << bit;
      std::memcpy(t.data<float>() + at, &flipped, 4);
      ops::checksum(t, other);
      EXPECT_TRUE(a[0] != b[0] || a[1] != b[1]) << at << " " << bit;
      std::memcpy(t.data<float>() + at, &word, 4);
    }
  std::swap(t.data<float>()[5], t.data<float>()[50000]);
  ops::checksum(t, other);
  EXPECT_TRUE(a[0] != b[0] || a[1] != b[1]);
}

}  // namespace
}  // namespace weft::test
