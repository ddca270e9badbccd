// Division of indices by multiplication (kernels/divide.cuh).
#include "divide.cuh"

#include <gtest/gtest.h>

#include <vector>

namespace weft::kernels {
namespace {

TEST(Divisor, DividesAsTheProcessorDoes) {
  constexpr unsigned most = (1u << 31) - 1;
  std::vector<unsigned> divisors;
  for (unsigned d = 1; d <= 300; ++d) divisors.push_back(d);
  for (int bit = 9; bit < 31; ++bit)
    for (const unsigned d : {(1u << bit) - 1, 1u << bit, (1u << bit) + 1}) divisors.push_back(d);
  divisors.push_back(most);
  for (const unsigned d : divisors) {
    const Divisor by(d);
    // Either side of multiples, where a quotient that is off by a little is off by one.
    for (const unsigned multiple : {0u, d, most / 2 / d * d, most / d * d})
      for (int step = -1; step <= 1; ++step) {
        const unsigned n = multiple + static_cast<unsigned>(step);
        if (n > most) continue;
        unsigned rest = n;
        EXPECT_EQ(by.divide(n), n / d) << n << " / " << d;
        EXPECT_EQ(by.split(rest), n / d) << n << " / " << d;
        EXPECT_EQ(rest, n % d) << n << " % " << d;
      }
  }
}

}  // namespace
}  // namespace weft::kernels
