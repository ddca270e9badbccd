#include <gtest/gtest.h>

#include <set>
#include <vector>

#include "core/clock.h"
#include "core/philox.h"

namespace weft {
namespace {

using Block = std::array<std::uint32_t, 4>;

TEST(Philox, KnownAnswersOfRandom123) {
  const std::uint32_t ones = 0xffffffffu;
  EXPECT_EQ(philox4x32({0, 0, 0, 0}, {0, 0}),
            (Block{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  EXPECT_EQ(philox4x32({ones, ones, ones, ones}, {ones, ones}),
            (Block{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  // Digits of pi as counter and key.
  EXPECT_EQ(philox4x32({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}),
            (Block{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST(Philox, EveryPartOfTheKeySeparatesStreams) {
  std::set<std::uint64_t> seen;
  const auto first = [](const Philox& p) { return std::uint64_t{p.u32(0)} << 32 | p.u32(1); };
  const std::uint64_t big = std::uint64_t{1} << 33;
  int streams = 0;
  for (const std::uint64_t seed : {std::uint64_t{1}, std::uint64_t{2}, big})
    for (const Purpose purpose : {Purpose::noise, Purpose::timestep})
      for (const std::uint64_t step : {std::uint64_t{0}, std::uint64_t{1}, std::uint64_t{1} << 24})
        for (const std::uint64_t sample : {std::uint64_t{0}, std::uint64_t{7}, big}) {
          seen.insert(first(Philox(seed, purpose, step, sample)));
          ++streams;
        }
  EXPECT_EQ(seen.size(), std::size_t(streams));
}

TEST(Philox, ElementsIndexBlocksOfFour) {
  const Philox p(42, Purpose::noise, 3, 5);
  for (std::uint32_t i = 0; i < 16; ++i) EXPECT_EQ(p.u32(i), p.block(i / 4)[i % 4]);
}

// Bounds are five standard errors of the estimate, so a true generator fails once in a million.
TEST(Philox, UniformHasTheRightMomentsAndStaysBelowOne) {
  const Philox p(1, Purpose::timestep, 0, 0);
  const int n = 1 << 18;
  double sum = 0, squares = 0;
  for (int i = 0; i < n; ++i) {
    const double u = p.uniform(i);
    ASSERT_GE(u, 0.0);
    ASSERT_LT(u, 1.0);
    sum += u;
    squares += u * u;
  }
  EXPECT_NEAR(sum / n, 0.5, 5 * std::sqrt(1.0 / 12 / n));
  EXPECT_NEAR(squares / n, 1.0 / 3, 5 * std::sqrt(4.0 / 45 / n));
  EXPECT_EQ(Philox::to_unit(0), 0.0f);
  EXPECT_LT(Philox::to_unit(0xffffffffu), 1.0f);
}

TEST(Philox, NormalHasTheRightMomentsAndIsFinite) {
  const Philox p(2, Purpose::noise, 9, 11);
  const int n = 1 << 18;
  double m1 = 0, m2 = 0, m4 = 0, neighbours = 0;
  float before = 0;
  for (int i = 0; i < n; ++i) {
    const float z = p.normal(i);
    ASSERT_TRUE(std::isfinite(z));
    m1 += z;
    m2 += double(z) * z;
    m4 += std::pow(double(z), 4);
    neighbours += double(z) * before;
    before = z;
  }
  EXPECT_NEAR(m1 / n, 0, 5 / std::sqrt(double(n)));
  EXPECT_NEAR(m2 / n, 1, 5 * std::sqrt(2.0 / n));
  EXPECT_NEAR(m4 / n, 3, 5 * std::sqrt(96.0 / n));
  EXPECT_NEAR(neighbours / n, 0, 5 / std::sqrt(double(n)));
  // The extremes of the generator's words: the logarithm never sees zero.
  EXPECT_TRUE(std::isfinite(Philox::gauss(0, 0, false)));
  EXPECT_TRUE(std::isfinite(Philox::gauss(0xffffffffu, 0xffffffffu, true)));
}

TEST(Philox, BelowCoversItsRangeEvenly) {
  const Philox p(3, Purpose::crop, 0, 0);
  const int n = 70000;
  std::vector<int> counts(7);
  for (int i = 0; i < n; ++i) {
    const std::uint32_t k = p.below(i, 7);
    ASSERT_LT(k, 7u);
    ++counts[k];
  }
  double chi2 = 0;
  for (const int c : counts) chi2 += (c - n / 7.0) * (c - n / 7.0) / (n / 7.0);
  EXPECT_LT(chi2, 38.0);  // 6 degrees of freedom, one in a million
  EXPECT_EQ(p.below(0, 1), 0u);
}

}  // namespace

namespace {

TEST(Statistics, Medians) {
  EXPECT_EQ(median({}), 0);
  EXPECT_EQ(upper_median({}), 0);
  EXPECT_EQ(median({3, 1, 2}), 2);
  EXPECT_EQ(upper_median({3, 1, 2}), 2);
  EXPECT_EQ(median({4, 1, 3, 2}), 2.5);
  EXPECT_EQ(upper_median({4, 1, 3, 2}), 3);
}

}  // namespace
}  // namespace weft
