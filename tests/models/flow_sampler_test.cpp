// The sampler for any denoiser: tables of times, solvers, negative captions, step cache. STDiT3's
// own sampling is in tests/models/stdit3/rectified_flow_test.cpp.
#include "models/flow_sampler.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <set>
#include <vector>

#include "core/error.h"
#include "models/solver.h"
#include "models/step_cache.h"
#include "tests/ops/reference.h"

namespace weft::test {
namespace {

constexpr std::int64_t B = 2, C = 2, T = 3, H = 2, W = 4, clip_size = C * T * H * W;

// What the denoiser below knows of clips with a caption: normal, with the mean of the caption's
// rows and a deviation of its own. So the velocity is known, and where it leads to.
struct Normal {
  double mean, deviation = 0.4;
  // x0 - eps at x, where the share of noise is s: both as expected, given x.
  double velocity(double x, double s) const {
    const double variance = (1 - s) * (1 - s) * deviation * deviation + s * s;
    const double away = (x - (1 - s) * mean) / variance;
    return mean + (1 - s) * deviation * deviation * away - s * away;
  }
  double data(double noise) const { return mean + deviation * noise; }  // exactly
};

class NormalDenoiser : public Denoiser {
 public:
  std::string name() const override { return "normal"; }
  ParameterTable& params() override { return none_; }
  std::set<std::string> tables() const override { return {}; }
  std::int64_t channels() const override { return C; }
  std::int64_t caption_channels() const override { return 1; }
  std::int64_t max_caption() const override { return 5; }
  std::string caption_keys() const override { return ""; }
  bool has_null_caption() const override { return !negative_; }
  double flops(std::int64_t, std::int64_t, std::int64_t) const override { return 0; }

  // [2B, C + 1, T, h, w]: with a channel behind that no sampler may heed.
  Tensor velocity(const DenoiserInput& in) override {
    times.push_back(static_cast<double>(in.timestep.data<float>()[0]));
    reused.push_back(in.reuse_blocks);
    Tensor v = Tensor::empty({in.x.dim(0), C + 1, T, H, W}, DType::f32);
    for (std::int64_t b = 0; b < in.x.dim(0); ++b) {
      const Normal field{mean_of(in.captions, b)};
      const double s = static_cast<double>(in.timestep.data<float>()[b]) / 1000;
      for (std::int64_t i = 0; i < (C + 1) * T * H * W; ++i)
        v.data<float>()[b * (C + 1) * T * H * W + i] =
            i < clip_size ? static_cast<float>(field.velocity(
                                static_cast<double>(in.x.data<float>()[b * clip_size + i]), s))
                          : 1e6f;
    }
    return v;
  }
  Tensor cache_signal(const DenoiserInput& in) override {
    return to_tensor({signal(static_cast<double>(in.timestep.data<float>()[0])), 1}, {2});
  }
  std::vector<double> cache_polynomial() const override {
    return published ? std::vector<double>{2, 0, 0.5} : std::vector<double>{};
  }
  static double signal(double timestep) { return std::sin(timestep / 100) + 2; }

  explicit NormalDenoiser(bool negative) : negative_(negative) {}
  std::vector<double> times;  // of each call, sample 0's
  std::vector<bool> reused;
  bool published = true;

 private:
  static double mean_of(const Captions& c, std::int64_t b) {
    double sum = 0;
    const std::int32_t *offset = c.offsets.data<std::int32_t>(),
                       *index = c.index.data<std::int32_t>();
    EXPECT_EQ(c.lengths[b], offset[b + 1] - offset[b]);
    for (std::int32_t r = offset[b]; r < offset[b + 1]; ++r)
      sum += index[r] < 0 ? -0.3 : static_cast<double>(c.y.data<float>()[index[r]]);
    return sum / static_cast<double>(c.lengths[b]);
  }
  ParameterTable none_;
  bool negative_;
};

// ---- Times

SamplerDeck sampler_of(const std::string& solver, std::int64_t steps, double shift) {
  SamplerDeck d;
  d.solver = solver;
  d.steps = steps;
  d.shift = shift;
  d.use_timestep_transform = false;
  return d;
}
Vec timesteps(const SamplerDeck& d) { return sampler_times(d, {}, {}).timestep; }

TEST(SamplerTimes, AreTheOriginalsTables) {
  EXPECT_EQ(timesteps(sampler_of("unipc", 8, 5)), (Vec{999, 972, 937, 892, 833, 749, 624, 416}));
  EXPECT_EQ(timesteps(sampler_of("dpm++", 8, 5)), (Vec{1000, 972, 937, 892, 833, 750, 625, 416}));
  const Vec fifty = timesteps(sampler_of("unipc", 50, 5));
  EXPECT_EQ((Vec{fifty[0], fifty[1], fifty[2], fifty[48], fifty[49]}),
            (Vec{999, 995, 991, 172, 92}));
  // Truncated in f64: (K - i) / K, or a sigma rounded to f32, would give 250.
  EXPECT_EQ(timesteps(sampler_of("dpm++", 10, 3))[9], 249);
  const SamplerTimes half = sampler_times(sampler_of("dpm++", 30, 5), {}, {});
  EXPECT_EQ(half.timestep[25], 499);
  EXPECT_EQ(half.sigma[25], 0.5);
  // sigma is rounded to f32, and ends at data.
  const SamplerTimes t = sampler_times(sampler_of("unipc", 8, 5), {}, {});
  const double u = static_cast<double>(0.999f);
  EXPECT_EQ(t.sigma[0], static_cast<double>(static_cast<float>(5 * u / (1 + 4 * u))));
  EXPECT_EQ(t.sigma.size(), 9u);
  EXPECT_EQ(t.sigma[8], 0);
}

TEST(SamplerTimes, OfEulerAreNotTruncated) {
  const Vec t = timesteps(sampler_of("euler", 4, 3));
  const Vec expected = {1000, 900, 750, 500};
  for (std::size_t i = 0; i < 4; ++i) EXPECT_NEAR(t[i], expected[i], 1e-9);
}

TEST(SamplerTimes, WithoutShiftAreStdit3s) {
  SamplerDeck d = sampler_of("unipc", 10, 0);
  const ClipSize size{240, 426, 51};
  EXPECT_EQ(sampler_times(d, {}, size).timestep[5], 500);
  d.use_timestep_transform = true;
  const SamplerTimes t = sampler_times(d, {}, size);
  EXPECT_EQ(t.timestep[5], timestep_transform(500, size, 1));
  EXPECT_EQ(t.sigma[0], 1);
  EXPECT_EQ(t.sigma[5], static_cast<double>(static_cast<float>(t.timestep[5] / 1000)));
}

TEST(SamplerTimes, StepsWithoutADistanceAreRefused) {
  EXPECT_THROW(sampler_times(sampler_of("unipc", 100000, 1000), {}, {}), Error);
  EXPECT_NO_THROW(sampler_times(sampler_of("euler", 100000, 1000), {}, {}));
}

// ---- Solvers

// The steps as they are published, in f64, for one number: `velocity` is eps - x0 of sample x at
// step i.
using Velocity = std::function<double(double x, std::size_t i)>;
double integrate(const std::string& solver, const Vec& sigma, double z, const Velocity& velocity) {
  const std::size_t K = sigma.size() - 1;
  const auto lambda = [&](std::size_t i) { return std::log((1 - sigma[i]) / sigma[i]); };
  const auto h = [&](std::size_t i) { return lambda(i + 1) - lambda(i); };
  const auto phi = [&](std::size_t i) { return std::isinf(h(i)) ? -1 : std::exp(-h(i)) - 1; };
  const auto alpha = [&](std::size_t i) { return 1 - sigma[i]; };
  const auto base = [&](std::size_t i, double x, double m) {
    return sigma[i + 1] / sigma[i] * x - alpha(i + 1) * phi(i) * m;
  };
  const auto order = [&](std::size_t i) { return std::min<std::size_t>({2, i + 1, K - i}); };
  Vec m;
  double c = z;  // the corrected sample
  for (std::size_t i = 0; i < K; ++i) {
    m.push_back(z - sigma[i] * velocity(z, i));
    if (solver == "dpm++") {
      double next = base(i, z, m[i]);
      if (i > 0 && i < K - 1) {
        const double r = (lambda(i) - lambda(i - 1)) / h(i);
        next -= 0.5 * alpha(i + 1) * phi(i) * (m[i] - m[i - 1]) / r;
      }
      z = i == K - 1 ? m[i] : next;
      continue;
    }
    if (i > 0) {
      const double D = m[i] - m[i - 1];
      double correction = 0.5 * D;
      if (order(i - 1) == 2) {
        const double r = (lambda(i - 2) - lambda(i - 1)) / h(i - 1);
        const double E = (m[i - 2] - m[i - 1]) / r;
        const double k1 = -phi(i - 1) / h(i - 1) - 1, k2 = -k1 / h(i - 1) - 0.5;
        const double b1 = k1 / phi(i - 1), b2 = 2 * k2 / phi(i - 1);
        const double rho1 = (b1 - b2) / (1 - r);
        correction = rho1 * E + (b1 - rho1) * D;
      }
      c = base(i - 1, c, m[i - 1]) - alpha(i) * phi(i - 1) * correction;
    }
    z = base(i, c, m[i]);
    if (order(i) == 2) {
      const double r = (lambda(i - 1) - lambda(i)) / h(i);
      z -= 0.5 * alpha(i + 1) * phi(i) * (m[i - 1] - m[i]) / r;
    }
  }
  return m[K - 1];
}

class FlowSampler : public OpTest {
 protected:
  // Two samples with captions of two rows and of one; one negative caption of three rows for both.
  SampleRequest request(bool negative) {
    SampleRequest r;
    r.z = to_tensor(noise_, {B, C, T, H, W});
    r.y = to_tensor({0.5, 1.1, 9, 0.2, 9, 9}, {2, 3, 1});
    r.captions = {{0, 1, 3}, {0, 2, 3}};
    if (negative) {
      r.negative_y = to_tensor({-0.2, -0.4, -0.9, -0.7, 9}, {1, 5, 1});
      r.negative = {{0, 1, 2, 0, 2, 3}, {0, 3, 6}};
    }
    r.fps = {24, 24};
    r.size = {240, 432, 51};
    return r;
  }
  // Means of the captions, and of what guidance leads away from.
  static constexpr std::array<double, 2> mean = {0.8, 0.2}, negative_mean = {-0.5, -0.6};

  Vec noise_ = random_values(B * clip_size, 3);
};

TEST_F(FlowSampler, StepsAreThoseOfTheFormulasInF64) {
  struct Case {
    const char* solver;
    std::int64_t steps;
    double shift;
  };
  for (const Case& c : {Case{"unipc", 8, 5},
                        {"unipc", 50, 5},
                        {"unipc", 1, 5},
                        {"unipc", 2, 3},
                        {"unipc", 3, 3},
                        {"unipc", 10, 0},
                        {"dpm++", 8, 5},
                        {"dpm++", 50, 5},
                        {"dpm++", 1, 5},
                        {"dpm++", 2, 3},
                        {"dpm++", 10, 0}}) {
    SCOPED_TRACE(fmt::format("{}, {} steps, shift {}", c.solver, c.steps, c.shift));
    SamplerDeck sampler = sampler_of(c.solver, c.steps, c.shift);
    sampler.use_timestep_transform = true;
    sampler.cfg_scale = {3};
    SampleRequest r = request(true);
    if (c.shift == 0) r.sizes = {{240, 432, 51}, {480, 854, 102}};  // each sample its own times
    Vec expected;
    for (std::size_t i = 0; i < noise_.size(); ++i) {
      const std::size_t b = i / clip_size;
      const SamplerTimes t = sampler_times(sampler, {}, c.shift == 0 ? r.sizes[b] : r.size);
      expected.push_back(integrate(c.solver, t.sigma, noise_[i], [&](double x, std::size_t step) {
        const double s = t.timestep[step] / 1000;
        const double with = Normal{mean[b]}.velocity(x, s),
                     without = Normal{negative_mean[b]}.velocity(x, s);
        return -(without + 3 * (with - without));
      }));
    }
    NormalDenoiser model(true);
    const std::size_t before = arena_->used();
    const Vec samples = to_values(flow_sample(model, sampler, {}, r));
    EXPECT_EQ(arena_->used(), before);
    EXPECT_LT(relative_error(samples, expected), 3e-6);
    EXPECT_EQ(std::ssize(model.times), c.steps);
  }
}

// To samples that are known: half the step, half the error of Euler's and a quarter of the others'.
TEST_F(FlowSampler, EachSolverHasItsOrder) {
  for (const auto& [solver, order] :
       {std::pair{"euler", 1.0}, std::pair{"dpm++", 2.0}, std::pair{"unipc", 2.0}}) {
    Vec errors;
    for (const std::int64_t steps : {128, 256}) {
      SamplerDeck sampler = sampler_of(solver, steps, 0);
      sampler.cfg_scale = {1};
      NormalDenoiser model(true);
      const Vec samples = to_values(flow_sample(model, sampler, {}, request(true)));
      Vec exact;
      for (std::size_t i = 0; i < noise_.size(); ++i)
        exact.push_back(Normal{mean[i / clip_size]}.data(noise_[i]));
      errors.push_back(relative_error(samples, exact));
    }
    EXPECT_NEAR(std::log2(errors[0] / errors[1]), order, 0.3) << solver;
  }
}

TEST_F(FlowSampler, AnEulerStepIsTheSameWithAndWithoutASolver) {
  SamplerDeck sampler = sampler_of("euler", 10, 3);
  NormalDenoiser model(true);
  const Vec samples = to_values(flow_sample(model, sampler, {}, request(true)));
  sampler.cache = "easycache";
  sampler.cache_threshold = 1e-30;  // nothing is skipped, but the velocity goes through the cache
  EXPECT_LT(relative_error(to_values(flow_sample(model, sampler, {}, request(true))), samples),
            1e-6);
}

TEST_F(FlowSampler, WithoutNegativeCaptionsGuidanceTakesTheNullCaption) {
  const SamplerDeck sampler = sampler_of("unipc", 12, 0);
  SampleRequest named = request(true);
  named.negative_y = to_tensor({-0.3}, {1, 1, 1});  // what the model's null caption is
  named.negative = {{0, 0}, {0, 1, 2}};
  NormalDenoiser model(false);
  const Vec null = to_values(flow_sample(model, sampler, {}, request(false)));
  EXPECT_LT(relative_error(to_values(flow_sample(model, sampler, {}, named)), null), 1e-6);
  EXPECT_GT(relative_error(to_values(flow_sample(model, sampler, {}, request(true))), null), 0.05);
}

TEST_F(FlowSampler, FramesThatAreGivenStay) {
  for (const char* solver : {"euler", "dpm++", "unipc"}) {
    const SamplerDeck sampler = sampler_of(solver, 6, 0);
    NormalDenoiser model(true);
    const Vec plain = to_values(flow_sample(model, sampler, {}, request(true)));
    SampleRequest r = request(true);
    r.edit = {1, 1, 1, 1, 1, 1};
    EXPECT_EQ(to_values(flow_sample(model, sampler, {}, r)), plain) << solver;
    r = request(true);
    r.edit = {0, 1, 1, 1, 1, 0};
    const Vec some = to_values(flow_sample(model, sampler, {}, r));
    for (std::size_t i = 0; i < some.size(); ++i) {
      const std::size_t frame = i / clip_size * T + i / (H * W) % T;
      const double given = static_cast<double>(static_cast<float>(noise_[i]));
      ASSERT_EQ(some[i], r.edit[frame] == 0 ? given : plain[i]) << solver << " " << i;
    }
  }
}

TEST_F(FlowSampler, FramesThatJoinLateAreEulers) {
  SampleRequest r = request(true);
  r.edit = {0.5f, 1, 1, 1, 1, 1};
  r.fresh_noise = [](int, Tensor& noise) { std::fill_n(noise.data<float>(), noise.numel(), 0.0f); };
  NormalDenoiser model(true);
  EXPECT_THROW(flow_sample(model, sampler_of("unipc", 4, 0), {}, r), Error);
  EXPECT_TRUE(model.times.empty());
  EXPECT_NO_THROW(flow_sample(model, sampler_of("euler", 4, 0), {}, r));
}

// ---- Step cache

double mean_change(const Vec& a, const Vec& b) {
  double sum = 0;
  for (std::size_t i = 0; i < a.size(); ++i) sum += std::abs(a[i] - b[i]);
  return sum / static_cast<double>(a.size());
}
double mean_size(const Vec& a) { return mean_change(a, Vec(a.size(), 0.0)); }

// EasyCache's rule in f64, with Euler steps: what it skips, and where that leads to.
TEST_F(FlowSampler, EasyCacheFollowsItsRule) {
  constexpr std::int64_t K = 30;
  constexpr double guidance = 3, threshold = 0.2;
  SamplerDeck sampler = sampler_of("euler", K, 3);
  sampler.cfg_scale = {guidance};
  const Vec t = timesteps(sampler);
  Vec x = noise_, before, ran_x, ran_captions, ran_guided;
  std::vector<double> expected_times;
  double sum = 0, ratio = 0;
  for (std::int64_t i = 0; i < K; ++i) {
    const double s = t[i] / 1000;
    bool run = i < 6 || i == K - 1;
    if (run) {
      sum = 0;
    } else {
      sum += ratio * mean_change(x, before) / mean_size(ran_captions);
      run = sum >= threshold;
      if (run) sum = 0;
    }
    before = x;
    Vec v;  // eps - x0
    if (run) {
      expected_times.push_back(t[i]);
      Vec captions;
      for (std::size_t j = 0; j < x.size(); ++j) {
        const std::size_t b = j / clip_size;
        captions.push_back(-Normal{mean[b]}.velocity(x[j], s));
        const double without = -Normal{negative_mean[b]}.velocity(x[j], s);
        v.push_back(without + guidance * (captions[j] - without));
      }
      if (i > 0) ratio = mean_change(captions, ran_captions) / mean_change(x, ran_x);
      ran_x = x, ran_captions = captions, ran_guided = v;
    } else {
      for (std::size_t j = 0; j < x.size(); ++j) v.push_back(ran_guided[j] + x[j] - ran_x[j]);
    }
    const double next = i + 1 < K ? t[i + 1] : 0;
    for (std::size_t j = 0; j < x.size(); ++j) x[j] -= v[j] * (t[i] - next) / 1000;
  }
  ASSERT_GT(std::ssize(expected_times), 8);
  ASSERT_LT(std::ssize(expected_times), K - 10);

  sampler.cache = "easycache";
  sampler.cache_threshold = threshold;
  NormalDenoiser model(true);
  std::int64_t skipped = 0;
  SampleRequest r = request(true);
  r.skipped = &skipped;
  const Vec samples = to_values(flow_sample(model, sampler, {}, r));
  ASSERT_EQ(std::ssize(model.times), std::ssize(expected_times));
  for (std::size_t i = 0; i < expected_times.size(); ++i)
    EXPECT_NEAR(model.times[i], expected_times[i], 1e-3);
  EXPECT_EQ(skipped, K - std::ssize(expected_times));
  EXPECT_LT(relative_error(samples, x), 1e-5);
}

TEST_F(FlowSampler, TeaCacheFollowsItsRule) {
  constexpr std::int64_t K = 30;
  constexpr double threshold = 1.2;
  SamplerDeck sampler = sampler_of("euler", K, 0);
  const Vec t = timesteps(sampler);
  std::vector<bool> expected;
  double sum = 0;
  for (std::int64_t i = 0; i < K; ++i) {
    bool reuse = false;
    if (i > 0 && i < K - 1) {
      const double a = NormalDenoiser::signal(t[i]), b = NormalDenoiser::signal(t[i - 1]);
      const double change = std::abs(a - b) / (b + 1);  // of the signal and the 1 beside it
      sum += 2 * change * change + 0.5;
      reuse = sum < threshold;
    }
    if (!reuse) sum = 0;
    expected.push_back(reuse);
  }
  sampler.cache = "teacache";
  sampler.cache_threshold = threshold;
  NormalDenoiser model(true);
  flow_sample(model, sampler, {}, request(true));
  EXPECT_EQ(model.reused, expected);
  const auto count = std::count(expected.begin(), expected.end(), true);
  EXPECT_GT(count, 5);
  EXPECT_LT(count, K - 5);
  model.published = false;
  EXPECT_THROW(check_cache(sampler, model), Error);
}

TEST_F(FlowSampler, AThresholdOfZeroKeepsTheBits) {
  for (const char* solver : {"euler", "unipc"}) {
    SamplerDeck sampler = sampler_of(solver, 12, 3);
    NormalDenoiser model(true);
    const Vec plain = to_values(flow_sample(model, sampler, {}, request(true)));
    for (const char* cache : {"teacache", "easycache"}) {
      sampler.cache = cache;
      EXPECT_EQ(to_values(flow_sample(model, sampler, {}, request(true))), plain) << cache;
    }
  }
}

// All ranks that sample together take the first one's number.
TEST_F(FlowSampler, TheGroupDecidesWhatIsSkipped) {
  SamplerDeck sampler = sampler_of("dpm++", 20, 3);
  sampler.cache = "easycache";
  sampler.cache_threshold = 1;
  for (const bool skip : {true, false}) {
    NormalDenoiser model(true);
    SampleRequest r = request(true);
    std::int64_t asked = 0, skipped = 0;
    r.agree = [&](double) {
      ++asked;
      return skip ? 0.0 : 2.0;
    };
    r.skipped = &skipped;
    flow_sample(model, sampler, {}, r);
    EXPECT_EQ(asked, 20 - 4 - 1);
    EXPECT_EQ(skipped, skip ? asked : 0);
    EXPECT_EQ(std::ssize(model.times), 20 - skipped);
  }
}

// Skipped steps may not carry a frame over the step in which it joins.
TEST_F(FlowSampler, AStepInWhichFramesJoinIsNotSkipped) {
  SamplerDeck sampler = sampler_of("euler", 20, 0);
  sampler.cache = "easycache";
  sampler.cache_threshold = 1000;
  NormalDenoiser model(true);
  SampleRequest r = request(true);
  r.edit = {0.5f, 1, 1, 1, 1, 1};
  r.fresh_noise = [](int, Tensor& noise) { std::fill_n(noise.data<float>(), noise.numel(), 0.0f); };
  flow_sample(model, sampler, {}, r);
  EXPECT_EQ(model.times, (Vec{1000, 950, 900, 850, 500, 50}));
}

}  // namespace
}  // namespace weft::test
