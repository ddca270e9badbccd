#include "ops/resize.h"

#include <algorithm>

#include "reference.h"

namespace weft::test {
namespace {

// Odd sizes: the last row and column belong to no rectangle.
TEST_F(OpTest, MaxPool) {
  const Shape in{1, 2, 5, 7, 20}, out{1, 2, 2, 3, 20};
  const Vec x = random_values(in.numel(), 6), g = random_values(out.numel(), 7);
  const auto pooled = [&](const Vec& v) {
    Vec y;
    for (int f = 0; f < 2; ++f)
      for (int r = 0; r < 2; ++r)
        for (int q = 0; q < 3; ++q)
          for (int c = 0; c < 20; ++c) {
            double best = -1e9;
            for (int k = 0; k < 4; ++k)
              best = std::max(best, v[static_cast<std::size_t>(
                                        ((f * 5 + 2 * r + k / 2) * 7 + 2 * q + k % 2) * 20 + c)]);
            y.push_back(best);
          }
    return y;
  };
  Tensor y = poisoned(out), dx = poisoned(in);
  ops::max_pool_forward(to_tensor(x, in), y);
  EXPECT_LT(relative_error(to_values(y), pooled(x)), 1e-6);
  ops::max_pool_backward(to_tensor(x, in), to_tensor(g, out), dx);
  expect_gradient([&](const Vec& v) { return dot(pooled(v), g); }, x, to_values(dx), 1e-5);
  // Among equals the first takes it all.
  ops::max_pool_backward(to_tensor(Vec(x.size(), 1.0), in), to_tensor(g, out), dx);
  EXPECT_EQ(to_values(dx)[0], to_values(to_tensor(g, out))[0]);
  EXPECT_EQ(to_values(dx)[20], 0);
}

}  // namespace
}  // namespace weft::test
