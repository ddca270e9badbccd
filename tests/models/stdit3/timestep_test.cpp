// Timesteps: the resolution and length transform, and how they are drawn.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>

#include "models/stdit3/options.h"
#include "models/stdit3/rectified_flow.h"

namespace weft {
namespace {

// docs/models/stdit3.md, Timestep transform: tau = 500 in f32 by the original.
TEST(TimestepTransform, MatchesTheOriginal) {
  struct Sample {
    ClipSize size;
    double expected;
  };
  const Sample samples[] = {
      {{240, 426, 1}, 384.4304},    {{240, 426, 51}, 707.4931},   {{480, 854, 102}, 872.5986},
      {{720, 1280, 204}, 935.5823}, {{720, 1280, 408}, 953.5739}, {{144, 256, 34}, 542.5129},
      {{256, 256, 17}, 527.8641},
  };
  for (const Sample& s : samples)
    for (const bool fix : {false, true})
      EXPECT_NEAR(timestep_transform(500, s.size, 1.0, fix), s.expected, 1e-4)
          << s.size.height << "x" << s.size.width << " " << s.size.num_frames;
}

TEST(TimestepTransform, MonotoneWithFixedEnds) {
  for (const ClipSize& size :
       {ClipSize{144, 256, 1}, ClipSize{720, 1280, 204}, ClipSize{64, 64, 9}}) {
    EXPECT_EQ(timestep_transform(0, size, 1.0, true), 0);
    EXPECT_DOUBLE_EQ(timestep_transform(1000, size, 1.0, true), 1000);
    double last = 0;
    for (int t = 1; t <= 1000; ++t) {
      const double now = timestep_transform(t, size, 1.0, true);
      ASSERT_GT(now, last);
      last = now;
    }
  }
  // The scale multiplies the ratio: 4 more frames of 17 at scale 1 are as 1 at scale 2.
  EXPECT_DOUBLE_EQ(timestep_transform(300, {512, 512, 68}, 1.0, true),
                   timestep_transform(300, {512, 512, 17}, 2.0, true));
}

TEST(TimestepTransform, ShortClipsKeepTheirTimestepsUnlessAsked) {
  for (std::int64_t frames = 2; frames <= 16; ++frames) {
    const ClipSize size{512, 512, frames};
    // The original: 0 everywhere, 0/0 at the end.
    EXPECT_EQ(timestep_transform(500, size, 1.0, false), 0);
    EXPECT_TRUE(std::isnan(timestep_transform(1000, size, 1.0, false)));
    // As an image of its size.
    EXPECT_DOUBLE_EQ(timestep_transform(500, size, 1.0, true),
                     timestep_transform(500, {512, 512, 1}, 1.0, false));
  }
  EXPECT_GT(timestep_transform(500, {512, 512, 17}, 1.0, true), 500);
}

// Largest distance of the sample's distribution from `cdf`, times sqrt(n): above 1.95 once in a
// thousand.
double kolmogorov(std::vector<double> v, const std::function<double(double)>& cdf) {
  std::sort(v.begin(), v.end());
  const auto n = static_cast<double>(v.size());
  double d = 0;
  for (std::size_t i = 0; i < v.size(); ++i) {
    const double f = cdf(v[i]), at = static_cast<double>(i);
    d = std::max({d, f - at / n, (at + 1) / n - f});
  }
  return d * std::sqrt(n);
}

std::vector<double> draw(const DiffusionDeck& d, const ClipSize& size, std::uint64_t seed = 5) {
  std::vector<double> v;
  for (std::uint64_t step = 0; step < 200; ++step)
    for (std::uint64_t sample = 0; sample < 50; ++sample)
      v.push_back(static_cast<double>(draw_timestep(d, size, seed, step, sample)));
  return v;
}

double normal_cdf(double z) { return 0.5 * std::erfc(-z / std::sqrt(2.0)); }
double logit(double u) { return std::log(u / (1 - u)); }

TEST(DrawTimestep, LogitNormal) {
  DiffusionDeck d;
  d.use_timestep_transform = false;
  EXPECT_LT(kolmogorov(draw(d, {}), [](double t) { return normal_cdf(logit(t / 1000)); }), 1.95);
  d.loc = -0.7;
  d.scale = 1.6;
  EXPECT_LT(
      kolmogorov(draw(d, {}), [](double t) { return normal_cdf((logit(t / 1000) + 0.7) / 1.6); }),
      1.95);
  EXPECT_GT(kolmogorov(draw(d, {}), [](double t) { return normal_cdf(logit(t / 1000)); }), 10)
      << "the bound cannot tell distributions apart";
}

TEST(DrawTimestep, Uniform) {
  DiffusionDeck d;
  d.use_timestep_transform = false;
  d.sample_method = "uniform";
  EXPECT_LT(kolmogorov(draw(d, {}), [](double t) { return t / 1000; }), 1.95);
}

TEST(DrawTimestep, Discrete) {
  DiffusionDeck d;
  d.use_timestep_transform = false;
  d.use_discrete_timesteps = true;
  const auto v = draw(d, {});
  for (const double t : v) ASSERT_EQ(t, std::round(t));
  EXPECT_EQ(*std::min_element(v.begin(), v.end()), 0);
  EXPECT_EQ(*std::max_element(v.begin(), v.end()), 999);
  // The steps of the distribution add at most 1/1000 * sqrt(n) = 0.1.
  EXPECT_LT(kolmogorov(v, [](double t) { return (t + 0.5) / 1000; }), 2.05);
}

TEST(DrawTimestep, TransformFollows) {
  DiffusionDeck d;
  d.transform_scale = 1.3;
  const ClipSize size{480, 854, 102};
  DiffusionDeck plain = d;
  plain.use_timestep_transform = false;
  const auto moved = draw(d, size), raw = draw(plain, size);
  for (std::size_t i = 0; i < raw.size(); ++i)
    ASSERT_NEAR(moved[i], timestep_transform(raw[i], size, 1.3, true), 1e-3);
}

TEST(DrawTimestep, FunctionOfSeedStepAndSample) {
  const DiffusionDeck d;
  const ClipSize size{240, 426, 51};
  EXPECT_EQ(draw_timestep(d, size, 1, 2, 3), draw_timestep(d, size, 1, 2, 3));
  EXPECT_NE(draw_timestep(d, size, 1, 2, 3), draw_timestep(d, size, 2, 2, 3));
  EXPECT_NE(draw_timestep(d, size, 1, 2, 3), draw_timestep(d, size, 1, 3, 3));
  EXPECT_NE(draw_timestep(d, size, 1, 2, 3), draw_timestep(d, size, 1, 2, 4));
  EXPECT_NE(draw_timestep(d, size, 1, 2, 3), draw_timestep(d, size, 1, 3, 2));
}

}  // namespace
}  // namespace weft
