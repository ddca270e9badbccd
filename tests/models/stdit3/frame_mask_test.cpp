// Frame masks of training: which frames each kind hides, how many, and how often it is drawn.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>

#include "models/stdit3/options.h"
#include "models/stdit3/rectified_flow.h"

namespace weft {
namespace {

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
  std::string s(static_cast<std::size_t>(n), '1');
  for (const auto& [begin, end] : ranges)
    for (std::int64_t f = begin; f < end; ++f) s[static_cast<std::size_t>(f)] = '0';
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

}  // namespace
}  // namespace weft
