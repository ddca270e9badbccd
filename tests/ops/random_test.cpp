#include "ops/random.h"
#include "reference.h"

namespace weft::test {
namespace {

TEST_F(OpTest, NormalNoiseIsAFunctionOfItsKey) {
  Tensor a = poisoned({100001}), b = poisoned({100001}), c = poisoned({100001});
  ops::fill_normal(1, static_cast<int>(Purpose::noise), 5, 9, a);
  ops::fill_normal(1, static_cast<int>(Purpose::noise), 5, 9, b);
  ops::fill_normal(1, static_cast<int>(Purpose::noise), 6, 9, c);
  EXPECT_EQ(to_values(a), to_values(b));
  double mean = 0, square = 0, cross = 0;
  for (std::int64_t i = 0; i < 100001; ++i) {
    const double v = a.data<float>()[i];
    mean += v / 100001;
    square += v * v / 100001;
    cross += v * c.data<float>()[i] / 100001;
  }
  EXPECT_NEAR(mean, 0, 0.02);
  EXPECT_NEAR(square, 1, 0.03);
  EXPECT_NEAR(cross, 0, 0.02);
  const Philox random(1, Purpose::noise, 5, 9);
  for (const std::uint32_t i : {0u, 1u, 2u, 3u, 99999u})
    EXPECT_EQ(a.data<float>()[i], random.normal(i));
}

}  // namespace
}  // namespace weft::test
