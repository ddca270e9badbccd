// What STDiT3 trains on besides latents (clip_latents_test.cpp), its loss, and its sampler.
#include "models/stdit3/rectified_flow.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <map>
#include <set>

#include "models/stdit3/options.h"
#include "tests/models/stdit3/fixture.h"

namespace weft::test {
namespace {

// ---- Timesteps

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
    EXPECT_NEAR(timestep_transform(500, s.size, 1.0), s.expected, 1e-4)
        << s.size.height << "x" << s.size.width << " " << s.size.num_frames;
}

TEST(TimestepTransform, MonotoneWithFixedEnds) {
  for (const ClipSize& size :
       {ClipSize{144, 256, 1}, ClipSize{720, 1280, 204}, ClipSize{64, 64, 9}}) {
    EXPECT_EQ(timestep_transform(0, size, 1.0), 0);
    EXPECT_DOUBLE_EQ(timestep_transform(1000, size, 1.0), 1000);
    double last = 0;
    for (int t = 1; t <= 1000; ++t) {
      const double now = timestep_transform(t, size, 1.0);
      ASSERT_GT(now, last);
      last = now;
    }
  }
  // The scale multiplies the ratio: 4 more frames of 17 at scale 1 are as 1 at scale 2.
  EXPECT_DOUBLE_EQ(timestep_transform(300, {512, 512, 68}, 1.0),
                   timestep_transform(300, {512, 512, 17}, 2.0));
}

TEST(TimestepTransform, TakesShortClipsAsImagesOfTheirSize) {
  for (std::int64_t frames = 2; frames <= 16; ++frames)
    EXPECT_DOUBLE_EQ(timestep_transform(500, {512, 512, frames}, 1.0),
                     timestep_transform(500, {512, 512, 1}, 1.0));
  EXPECT_GT(timestep_transform(500, {512, 512, 17}, 1.0), 500);
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
    ASSERT_NEAR(moved[i], timestep_transform(raw[i], size, 1.3), 1e-3);
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

// ---- Frame masks

constexpr int draws = 4000;

struct Kind {
  const char* name;
  double MaskDeck::*share;
};
const Kind kinds[] = {
    {"random", &MaskDeck::random},
    {"intepolate", &MaskDeck::intepolate},
    {"quarter_random", &MaskDeck::quarter_random},
    {"quarter_head", &MaskDeck::quarter_head},
    {"quarter_tail", &MaskDeck::quarter_tail},
    {"quarter_head_tail", &MaskDeck::quarter_head_tail},
    {"image_random", &MaskDeck::image_random},
    {"image_head", &MaskDeck::image_head},
    {"image_tail", &MaskDeck::image_tail},
    {"image_head_tail", &MaskDeck::image_head_tail},
};

using Mask = std::vector<std::uint8_t>;

// How often each mask came up when only `kind` is drawn.
std::map<std::string, int> histogram(const Kind& kind, std::int64_t n) {
  MaskDeck d;
  d.*kind.share = 1.0;
  std::map<std::string, int> seen;
  for (int i = 0; i < draws; ++i) {
    const Mask m = draw_frame_mask(d, n, 3, static_cast<std::uint64_t>(i / 50),
                                   static_cast<std::uint64_t>(i % 50));
    EXPECT_EQ(m.size(), static_cast<std::size_t>(n));
    std::string s;
    for (const auto v : m) s += v == 0 ? '0' : v == 1 ? '1' : '?';
    ++seen[s];
  }
  return seen;
}

// Holds the counts to `expected` shares, five standard deviations wide; no other mask may come up.
void expect_shares(const std::map<std::string, int>& seen,
                   const std::map<std::string, double>& expected, const std::string& what) {
  for (const auto& [mask, count] : seen)
    EXPECT_TRUE(expected.contains(mask)) << what << ": " << mask;
  for (const auto& [mask, share] : expected) {
    const auto at = seen.find(mask);
    EXPECT_NEAR(at == seen.end() ? 0 : at->second, draws * share,
                5 * std::sqrt(draws * share * (1 - share)))
        << what << ": " << mask;
  }
}

std::string hidden(std::int64_t n, std::vector<std::pair<std::int64_t, std::int64_t>> ranges) {
  std::string s(n, '1');
  for (const auto& [begin, end] : ranges)
    for (std::int64_t f = begin; f < end; ++f) s[f] = '0';
  return s;
}

TEST(FrameMask, HeadTailAndBothOfOneFrame) {
  for (const std::int64_t n : {3, 5, 15}) {
    expect_shares(histogram(kinds[7], n), {{hidden(n, {{0, 1}}), 1}}, "image_head");
    expect_shares(histogram(kinds[8], n), {{hidden(n, {{n - 1, n}}), 1}}, "image_tail");
    expect_shares(histogram(kinds[9], n), {{hidden(n, {{0, 1}, {n - 1, n}}), 1}},
                  "image_head_tail");
  }
  // Of two frames both would go; the last stays to be learnt from.
  expect_shares(histogram(kinds[7], 2), {{"01", 1}}, "image_head");
  expect_shares(histogram(kinds[8], 2), {{"10", 1}}, "image_tail");
  expect_shares(histogram(kinds[9], 2), {{"01", 1}}, "image_head_tail");
}

TEST(FrameMask, QuartersDrawTheirLength) {
  const std::int64_t n = 15;  // up to 3 frames
  std::map<std::string, double> head, tail, both, anywhere;
  for (std::int64_t k = 1; k <= 3; ++k) {
    head[hidden(n, {{0, k}})] = 1.0 / 3;
    tail[hidden(n, {{n - k, n}})] = 1.0 / 3;
    both[hidden(n, {{0, k}, {n - k, n}})] = 1.0 / 3;
    for (std::int64_t at = 0; at <= n - k; ++at)
      anywhere[hidden(n, {{at, at + k}})] = 1.0 / 3 / static_cast<double>(n - k + 1);
  }
  expect_shares(histogram(kinds[3], n), head, "quarter_head");
  expect_shares(histogram(kinds[4], n), tail, "quarter_tail");
  expect_shares(histogram(kinds[5], n), both, "quarter_head_tail");
  expect_shares(histogram(kinds[2], n), anywhere, "quarter_random");
  // Below 4 frames a quarter is none, on which the original fails: one frame is taken.
  for (const std::int64_t few : {2, 3, 5}) {
    expect_shares(histogram(kinds[3], few), {{hidden(few, {{0, 1}}), 1}}, "quarter_head");
    expect_shares(histogram(kinds[4], few), {{hidden(few, {{few - 1, few}}), 1}}, "quarter_tail");
  }
}

TEST(FrameMask, OneFrameAnywhere) {
  for (const std::int64_t n : {2, 3, 5, 15}) {
    std::map<std::string, double> expected;
    for (std::int64_t at = 0; at < n; ++at)
      expected[hidden(n, {{at, at + 1}})] = 1.0 / static_cast<double>(n);
    expect_shares(histogram(kinds[6], n), expected, "image_random");
  }
}

TEST(FrameMask, EverySecondFrame) {
  expect_shares(histogram(kinds[1], 5), {{"01010", 0.5}, {"10101", 0.5}}, "intepolate");
  expect_shares(histogram(kinds[1], 2), {{"01", 0.5}, {"10", 0.5}}, "intepolate");
}

// Each frame is kept by rand > ratio with ratio uniform in [0.1, 0.9]: half of them, and together
// more spread than independent coins.
TEST(FrameMask, RandomDrawsItsRatio) {
  const std::int64_t n = 15;
  double sum = 0, squares = 0;
  for (const auto& [mask, count] : histogram(kinds[0], n)) {
    EXPECT_NE(mask.find('1'), std::string::npos);
    const auto kept = static_cast<double>(std::count(mask.begin(), mask.end(), '1'));
    sum += count * kept;
    squares += count * kept * kept;
  }
  const double mean = sum / draws, variance = squares / draws - mean * mean;
  // Var = E[n r(1-r)] + n^2 Var(r), r uniform of width 0.8.
  const double var_r = 0.64 / 12, expected = n * (0.25 - var_r) + n * n * var_r;
  EXPECT_NEAR(mean, n / 2.0, 5 * std::sqrt(expected / draws));
  EXPECT_NEAR(variance, expected, 0.08 * expected);
}

TEST(FrameMask, NeverAllHiddenAndNoneOfOneFrame) {
  for (const Kind& kind : kinds) {
    for (const std::int64_t n : {2, 3, 5, 15})
      for (const auto& [mask, count] : histogram(kind, n)) {
        EXPECT_NE(mask.find('1'), std::string::npos) << kind.name << " " << n;
        if (kind.share != &MaskDeck::random) {
          EXPECT_NE(mask.find('0'), std::string::npos) << kind.name << " " << n;
        }
      }
    expect_shares(histogram(kind, 1), {{"1", 1}}, kind.name);
  }
}

TEST(FrameMask, SharesOfTheKinds) {
  // Kinds that their masks of 5 frames tell apart, and the rest without any.
  MaskDeck d;
  d.image_head = 0.22;
  d.image_tail = 0.1;
  d.intepolate = 0.3;
  EXPECT_TRUE(masks_wanted(d));
  std::map<std::string, int> seen;
  for (int i = 0; i < draws; ++i) {
    std::string s;
    for (const auto v : draw_frame_mask(d, 5, 3, 0, static_cast<std::uint64_t>(i)))
      s += v ? '1' : '0';
    ++seen[s];
  }
  expect_shares(
      seen, {{"01111", 0.22}, {"11110", 0.1}, {"01010", 0.15}, {"10101", 0.15}, {"11111", 0.38}},
      "mixture");
  EXPECT_FALSE(masks_wanted(MaskDeck{}));
  for (const Kind& kind : kinds) {
    MaskDeck one;
    one.*kind.share = 0.001;
    EXPECT_TRUE(masks_wanted(one)) << kind.name;
  }
}

TEST(FrameMask, FunctionOfSeedStepAndSample) {
  MaskDeck d;
  d.random = 1;
  const Mask m = draw_frame_mask(d, 64, 1, 2, 3);
  EXPECT_EQ(draw_frame_mask(d, 64, 1, 2, 3), m);
  EXPECT_NE(draw_frame_mask(d, 64, 2, 2, 3), m);
  EXPECT_NE(draw_frame_mask(d, 64, 1, 3, 3), m);
  EXPECT_NE(draw_frame_mask(d, 64, 1, 2, 4), m);
}

// ---- Batch, loss and sampler

using Ints = std::vector<std::int32_t>;

TEST(PackCaptions, RowsOfTheMask) {
  const std::vector<std::int64_t> mask{1, 1, 0, 0, 1, 0, 1, 0};  // two captions of length 4
  const CaptionBatch two = pack_captions(mask, 4, 2, false);
  EXPECT_EQ(two.index, (Ints{0, 1, 4, 6}));
  EXPECT_EQ(two.offsets, (Ints{0, 2, 4}));
  // Tiled m0 m1 m0 m1, each with its own features.
  const CaptionBatch four = pack_captions(mask, 4, 4, false);
  EXPECT_EQ(four.index, (Ints{0, 1, 4, 6, 8, 9, 12, 14}));
  EXPECT_EQ(four.offsets, (Ints{0, 2, 4, 6, 8}));
}

TEST(PackCaptions, RowsOnAGpuTakeFewCounts) {
  EXPECT_EQ(padded_caption_rows(0, 1, 100000), 0u);
  const auto counts = [](std::size_t most, std::int64_t clips, std::int64_t tokens) {
    std::set<std::size_t> found;
    for (std::size_t rows = 1, last = 0; rows <= most; ++rows) {
      const std::size_t padded = padded_caption_rows(rows, clips, tokens);
      EXPECT_GE(padded, std::max(rows, last)) << rows;
      EXPECT_EQ(padded % 64, 0u) << rows;
      const auto beside =
          std::min(static_cast<std::size_t>(tokens) / 32, 256 * static_cast<std::size_t>(clips));
      EXPECT_LT(padded - rows, std::max({std::size_t{64}, rows / 8 + 1, beside})) << rows;
      found.insert(last = padded);
    }
    return found.size();
  };
  EXPECT_LE(counts(142500, 475, 0), 80u);
  EXPECT_LE(counts(142500, 475, 475 * 144), 70u);  // 2,227 in steps of 64
  EXPECT_EQ(counts(300, 1, 15 * 1590), 2u);
  EXPECT_EQ(counts(300, 1, 0), 5u);
}

TEST(PackCaptions, NullRowsAndNoMask) {
  const CaptionBatch null = pack_captions({}, 3, 2, true);
  EXPECT_EQ(null.index, (Ints{-1, -2, -3, -1, -2, -3}));
  EXPECT_EQ(null.offsets, (Ints{0, 3, 6}));
  EXPECT_EQ(pack_captions({}, 2, 2, false).index, (Ints{0, 1, 2, 3}));
  const std::vector<std::int64_t> mask{0, 1, 1};
  EXPECT_EQ(pack_captions(mask, 3, 1, true).index, (Ints{-2, -3}));
  const std::vector<std::int64_t> none{0, 0, 0};
  EXPECT_EQ(pack_captions(none, 3, 2, false).index, Ints{});
  EXPECT_EQ(pack_captions(none, 3, 2, false).offsets, (Ints{0, 0, 0}));
}

class FlowTest : public OpTest {
 protected:
  static constexpr std::int64_t B = 2, T = 3, H = 4, W = 6;
  FlowTest() : model_(tiny_model()), shape_{B, model_.net.config().in_channels, T, H, W} {}

  Tensor random(std::uint64_t stream) {
    return to_tensor(random_values(shape_.numel(), stream), shape_);
  }
  Model model_;
  Shape shape_;
};

TEST_F(FlowTest, LossAndItsGradient) {
  const Batch batch{.B = B, .T = T, .H = H, .W = W, .captions = {{0, 1}, {-1}}};
  for (const bool masked : {false, true}) {
    Stdit3Input in = make_input(model_.net.config(), batch);
    const Vec mask = masked ? Vec{1, 0, 1, 0, 0, 1} : Vec(6, 1.0);
    if (masked) in.x_mask = to_tensor(mask, {B, T}, DType::u8);
    const Tensor x0 = random(1), eps = random(2);
    const Vec data = to_values(x0), noise = to_values(eps);
    // docs/models/stdit3.md, Training loss, with the model's own output.
    const auto reference = [&] {
      Vec xs(data.size());
      const std::int64_t C = shape_[1], frame = H * W;
      for (std::size_t i = 0; i < xs.size(); ++i) {
        const auto b = static_cast<std::int64_t>(i) / (C * T * frame);
        const auto t = static_cast<std::int64_t>(i) / frame % T;
        const double s = static_cast<double>(in.timestep.data<float>()[b]) / 1000;
        xs[i] = mask[b * T + t] != 0 ? (1 - s) * data[i] + s * noise[i] : data[i];
      }
      Stdit3Input at = in;
      at.x = to_tensor(xs, shape_);
      const Vec out = model_(at);
      Vec losses(B, 0.0);
      for (std::int64_t b = 0; b < B; ++b) {
        double frames = 0;
        for (std::int64_t t = 0; t < T; ++t) frames += mask[b * T + t];
        for (std::int64_t c = 0; c < C; ++c)
          for (std::int64_t p = 0; p < T * frame; ++p) {
            const auto i = static_cast<std::size_t>((b * C + c) * T * frame + p);
            const auto o = static_cast<std::size_t>((b * 2 * C + c) * T * frame + p);
            losses[b] += mask[b * T + p / frame] * std::pow(out[o] - (data[i] - noise[i]), 2) /
                         (frames * static_cast<double>(C * frame));
          }
      }
      return losses;
    };
    model_.net.params().begin_step([](int) {});
    const std::size_t before = arena_->used();
    {
      Tape tape;
      const Tensor loss = flow_loss(tape, model_.net, x0, eps, in, to_tensor({0.25}, {1}));
      EXPECT_LT(relative_error(to_values(loss), reference()), 1e-5);
      tape.backward();
      // Without a backward the loss is the same and nothing is kept.
      Tape infer(Tape::Mode::infer);
      EXPECT_EQ(to_values(flow_loss(infer, model_.net, x0, eps, in, to_tensor({0.25}, {1}))),
                to_values(loss));
    }
    model_.net.params().finish_step();
    EXPECT_EQ(arena_->used(), before);
    const auto weighted = [&] {
      const Vec l = reference();
      return 0.25 * (l[0] + l[1]);
    };
    for (const char* name : {"final_layer.linear.weight", "t_embedder.mlp.2.weight",
                             "temporal_blocks.0.attn.qkv.weight", "x_embedder.proj.weight"}) {
      const Parameter* p = model_.net.params().find(name);
      expect_slope(name, p->value, to_values(p->grad), weighted, 2e-2);
    }
    // The sigma half of the final layer has no part in the loss.
    const Tensor& g = model_.net.params().find("final_layer.linear.bias")->grad;
    for (std::int64_t i = 0; i < g.numel(); ++i)
      EXPECT_EQ(g.data<float>()[i] == 0, i % 4 >= 2) << i;
  }
}

class SamplerTest : public FlowTest {
 protected:
  SamplerTest() {
    sampler_.steps = 10;
    sampler_.cfg_scale = {2.5};
    sampler_.use_timestep_transform = false;
  }
  // Sample 0 has two rows of features, sample 1 one.
  SampleRequest request(std::vector<float> edit = {}) {
    SampleRequest r;
    r.z = random(11);
    const Stdit3Config& d = model_.net.config();
    r.y = to_tensor(random_values(B * d.model_max_length * d.caption_channels, 12),
                    {B, d.model_max_length, d.caption_channels});
    r.captions = pack_captions(std::vector<std::int64_t>{1, 1, 0, 0, 1, 0, 0, 0}, 4, B, false);
    r.fps = {24, 12};
    r.size = {24, 40, 17};
    r.edit = std::move(edit);
    r.fresh_noise = [this](int step, Tensor& noise) {
      noised_at_.push_back(step);
      const Vec v = random_values(noise.numel(), 500 + static_cast<std::uint64_t>(step));
      for (std::size_t i = 0; i < v.size(); ++i) noise.data<float>()[i] = static_cast<float>(v[i]);
    };
    return r;
  }
  Vec sample(const SampleRequest& r) {
    const std::size_t before = arena_->used();
    const Tensor z = flow_sample(model_.net, sampler_, diffusion_, r);
    EXPECT_EQ(z.raw(), r.z.raw()) << "denoised in place";
    EXPECT_EQ(arena_->used(), before);
    return to_values(z);
  }

  // docs/models/stdit3.md, Sampling, in f64 around the model, one half at a time: the conditional
  // captions, then the null caption with the same counts.
  Vec reference(const SampleRequest& r) {
    const Stdit3Config& d = model_.net.config();
    Vec z = to_values(r.z);
    const auto K = static_cast<int>(sampler_.steps);
    std::vector<double> tau;
    for (int i = 0; i < K; ++i) {
      double t = (1 - static_cast<double>(i) / K) * 1000;
      if (diffusion_.use_discrete_timesteps) t = std::round(t);
      if (sampler_.use_timestep_transform) t = timestep_transform(t, r.size, 1.0);
      tau.push_back(t);
    }
    tau.push_back(0);
    const std::int64_t C = d.in_channels, frame = H * W;
    const std::vector<float> edit = r.edit.empty() ? std::vector<float>(B * T, 1.0f) : r.edit;
    std::vector<bool> seen;
    for (const float e : edit) seen.push_back(e == 1);
    for (int i = 0; i < K; ++i) {
      const Vec noise = random_values(r.z.numel(), 500 + static_cast<std::uint64_t>(i));
      std::vector<bool> act;
      for (const float e : edit) act.push_back(1000.0f * e >= static_cast<float>(tau[i]));
      const auto site = [&](std::size_t p) {
        return p / static_cast<std::size_t>(C * T * frame) * T +
               p / static_cast<std::size_t>(frame) % T;
      };
      for (std::size_t p = 0; p < z.size(); ++p)
        if (act[site(p)] && !seen[site(p)])
          z[p] = (1 - tau[i] / 1000) * z[p] + tau[i] / 1000 * noise[p];
      seen = act;
      Stdit3Input in;
      in.x = to_tensor(z, shape_);
      in.timestep = to_tensor(Vec(B, tau[i]), {B});
      in.fps = to_tensor({r.fps.begin(), r.fps.end()}, {B});
      in.height = r.size.height;
      in.width = r.size.width;
      if (!r.edit.empty()) in.x_mask = to_tensor(Vec(act.begin(), act.end()), {B, T}, DType::u8);
      in.captions = upload(r.captions, r.y);
      const Vec conditional = model_(in);
      in.captions = upload(
          pack_captions(std::vector<std::int64_t>{1, 1, 0, 0, 1, 0, 0, 0}, 4, B, true), Tensor());
      const Vec null = model_(in);
      for (std::size_t p = 0; p < z.size(); ++p) {
        if (!act[site(p)]) continue;
        const auto half = static_cast<std::size_t>(C * T * frame);
        const std::size_t o = p / half * 2 * half + p % half;  // the first half of the channels
        z[p] += (null[o] + sampler_.cfg_scale[0] * (conditional[o] - null[o])) *
                (tau[i] - tau[i + 1]) / 1000;
      }
    }
    return z;
  }

  SamplerDeck sampler_;
  DiffusionDeck diffusion_;
  std::vector<int> noised_at_;
};

TEST_F(SamplerTest, FollowsTheSpecification) {
  for (const bool transform : {false, true}) {
    sampler_.use_timestep_transform = transform;
    const SampleRequest plain = request();
    const Vec expected = reference(plain);
    EXPECT_LT(relative_error(sample(plain), expected), 2e-4) << "transform " << transform;
    const SampleRequest mixed = request({1, 0, 0.5f, 0.3f, 1, 0});
    const Vec edited = reference(mixed);
    EXPECT_LT(relative_error(sample(mixed), edited), 2e-4) << "transform " << transform;
    EXPECT_GT(relative_error(edited, expected), 0.01);
  }
}

// 240x432: the first tau is 1000 and a rounding error.
TEST_F(SamplerTest, AllOnesIsNoMaskWhereTauRoundsAbove1000) {
  sampler_.use_timestep_transform = true;
  Vec results[2];
  for (const bool masked : {false, true}) {
    SampleRequest r = request(std::vector<float>(masked ? B * T : 0, 1.0f));
    r.size = {240, 432, 1};
    ASSERT_GT(timestep_transform(1000, r.size, 1), 1000);
    results[masked] = sample(r);
  }
  EXPECT_EQ(results[1], results[0]);
  EXPECT_TRUE(noised_at_.empty());
}

// The original's rule: mask * 1000 >= t, both in f32, with t = (1 - i / K) * 1000 rounded from f64.
// Of 495,495 ratios, step counts and steps 136 come out otherwise in f64, 0.7 and 0.9 at 10 steps
// among them; in f32 all are as in exact arithmetic.
TEST(EditRatio, JoinsAsTheOriginalDoes) {
  int exact = 0, otherwise = 0;
  for (int percent = 1; percent < 100; ++percent)
    for (int steps = 10; steps <= 100; ++steps)
      for (int i = 0; i < steps; ++i) {
        const float edit = static_cast<float>(percent / 100.0);
        const double tau = (1.0 - static_cast<double>(i) / steps) * 1000.0;
        volatile float until = edit;  // a product in f32 that nothing keeps in a wider register
        until = until * 1000.0f;
        ASSERT_EQ(is_active(edit, tau), until >= static_cast<float>(tau))
            << percent << "% of " << steps << " steps, step " << i;
        exact += is_active(edit, tau) == (percent * steps >= 100 * (steps - i));
        otherwise += is_active(edit, tau) != (1000.0 * static_cast<double>(edit) >= tau);
      }
  EXPECT_EQ(exact, 495495);
  EXPECT_EQ(otherwise, 136);
}

TEST_F(SamplerTest, EditedFramesJoinAtTheirStep) {
  SampleRequest r = request({0.5f, 1, 1, 1, 0.25f, 1});
  const Vec start = to_values(r.z);
  std::vector<Vec> states{start};
  r.progress = [&](int done, int steps) {
    EXPECT_EQ(steps, 10);
    EXPECT_EQ(done, static_cast<int>(states.size()));
    states.push_back(to_values(r.z));
  };
  sample(r);
  ASSERT_EQ(states.size(), 11u);
  // tau = 1000, 900, ...: 500 is reached in step 5, 250 passed in step 8 (tau = 200).
  EXPECT_EQ(noised_at_, (std::vector<int>{5, 8}));
  const std::size_t first = 0,
                    second = 144 + 24;  // a pixel of frame 0 of sample 0, of frame 1 of sample 1
  for (int i = 0; i <= 10; ++i) {
    const auto& z = states[i];
    EXPECT_EQ(z[first] == start[first], i <= 5) << i;
    EXPECT_EQ(z[second] == start[second], i <= 8) << i;
  }
}

TEST_F(SamplerTest, DiscreteTimestepsAreRounded) {
  sampler_.steps = 3;
  diffusion_.use_discrete_timesteps = true;
  const SampleRequest r = request();  // 1000, 667, 333 instead of 1000, 666.7, 333.3
  const Vec discrete = reference(r);
  EXPECT_LT(relative_error(sample(r), discrete), 2e-4);
  diffusion_.use_discrete_timesteps = false;
  EXPECT_GT(relative_error(reference(request()), discrete), 1e-3);
}

// What the blocks added, added again, is the velocity; with the captions' part in it.
TEST_F(SamplerTest, BlocksOfAStepCacheGiveTheirVelocityAgain) {
  Stdit3Input in =
      make_input(model_.net.config(), {.B = B, .T = T, .H = H, .W = W, .captions = {{0, 1}, {-1}}});
  const Vec plain = to_values(model_.net.velocity(in));
  Tensor blocks;
  in.blocks = &blocks;
  EXPECT_EQ(to_values(model_.net.velocity(in)), plain);
  EXPECT_EQ(blocks.numel() % (B * T), 0);
  in.reuse_blocks = true;
  in.captions = {};
  EXPECT_LT(relative_error(to_values(model_.net.velocity(in)), plain), 1e-5);
  // Of another input it is another one, but not that input's own.
  in.x = random(77);
  const Vec reused = to_values(model_.net.velocity(in));
  EXPECT_GT(relative_error(reused, plain), 1e-4);
}

// (1 + scale) LN(tokens) + shift of the first block, before its attention.
TEST_F(SamplerTest, TheCachesSignalIsTheFirstBlocksModulatedInput) {
  Stdit3Input in =
      make_input(model_.net.config(), {.B = B, .T = T, .H = H, .W = W, .captions = {{0, 1}, {-1}}});
  const auto& params = model_.net.params();
  const Tensor& table = params.find("spatial_blocks.0.scale_shift_table")->value;
  const std::int64_t channels = model_.net.config().hidden_size;
  // Without the timestep's part a row is the table's alone.
  for (const char* name : {"t_block.1.weight", "t_block.1.bias"}) {
    const Tensor& value = params.find(name)->value;
    std::fill_n(value.data<float>(), value.numel(), 0.0f);
  }
  const Vec signal = to_values(model_.net.cache_signal(in));
  const std::size_t tokens = signal.size() / static_cast<std::size_t>(channels);
  for (std::size_t token = 0; token < tokens; ++token) {
    double mean = 0, square = 0;  // of LN(tokens)
    for (std::int64_t c = 0; c < channels; ++c) {
      const double shift = static_cast<double>(table.data<float>()[c]);
      const double scale = static_cast<double>(table.data<float>()[channels + c]);
      const double normal = (signal[token * channels + c] - shift) / (1 + scale);
      mean += normal / static_cast<double>(channels);
      square += normal * normal / static_cast<double>(channels);
    }
    EXPECT_NEAR(mean, 0, 1e-4);
    EXPECT_NEAR(square, 1, 1e-3);
  }
}

}  // namespace
}  // namespace weft::test
