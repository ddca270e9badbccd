// ops/reduce.h: equal bits give equal sums, a single changed bit never does.
#include "ops/reduce.h"

#include <cmath>
#include <cstring>

#include "reference.h"

namespace weft::test {
namespace {

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
