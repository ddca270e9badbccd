#include "train/metrics/metrics.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>

namespace weft {
namespace {

TEST(Spikes, ALeapIsToldOnce) {
  SpikeWatch watch(10);
  std::mt19937 random(1);
  std::normal_distribution<double> loss(1.0, 0.1);
  for (int i = 0; i < 200; ++i) EXPECT_FALSE(watch.step(loss(random))) << i;
  const auto spike = watch.step(8);
  ASSERT_TRUE(spike);
  EXPECT_NEAR(spike->median, 1, 0.1);
  EXPECT_GT(spike->deviations, 40);
  EXPECT_FALSE(watch.step(9));  // still the same one
  EXPECT_FALSE(watch.step(1));
  EXPECT_TRUE(watch.step(7));
}

TEST(Spikes, NothingIsJudgedBeforeThereIsEnoughToCompareWith) {
  SpikeWatch watch(10);
  for (std::size_t i = 0; i + 1 < SpikeWatch::least; ++i) watch.step(1);
  EXPECT_FALSE(watch.step(1000));
  EXPECT_TRUE(watch.step(1000));
}

// The losses of rectified flow: small batches, timesteps from 0 to 1, falling over thousands of
// steps.
TEST(Spikes, NoisyLossesThatFallGiveNoAlarm) {
  for (int seed = 0; seed < 20; ++seed) {
    SpikeWatch watch(10);
    std::mt19937 random(static_cast<unsigned>(seed));
    std::lognormal_distribution<double> noise(0, 0.35);
    for (int i = 0; i < 5000; ++i)
      EXPECT_FALSE(watch.step((0.3 + 2 * std::exp(-i / 800.0)) * noise(random)))
          << seed << ' ' << i;
  }
}

TEST(Spikes, LossesThatHardlyVaryMakeNothingOfLittle) {
  SpikeWatch watch(10);
  for (int i = 0; i < 100; ++i) watch.step(2.0 + 1e-6 * (i % 3));
  EXPECT_FALSE(watch.step(2.5));
  EXPECT_TRUE(watch.step(3.5));
}

TEST(Spikes, ANewLevelIsTakenForGranted) {
  SpikeWatch watch(10);
  for (int i = 0; i < 100; ++i) watch.step(1);
  EXPECT_TRUE(watch.step(50));
  for (int i = 0; i < 100; ++i) EXPECT_FALSE(watch.step(50)) << i;
  EXPECT_FALSE(watch.step(60));
  EXPECT_FALSE(watch.step(-50));  // a fall is none
}

}  // namespace
}  // namespace weft
