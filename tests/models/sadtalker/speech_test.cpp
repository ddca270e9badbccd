// The mel spectrogram against its definition, and the windows that are cut out of it.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <complex>
#include <set>
#include <vector>

#include "core/error.h"
#include "models/sadtalker/mel.h"
#include "models/sadtalker/speech_motion.h"
#include "models/sadtalker/speech_networks.h"
#include "tensor/tensor.h"

namespace weft::test {
namespace {

std::vector<float> tone(double hz, std::size_t count) {
  std::vector<float> samples;
  for (std::size_t i = 0; i < count; ++i)
    samples.push_back(0.5f *
                      static_cast<float>(std::sin(2 * M_PI * hz * static_cast<double>(i) / 16000)));
  return samples;
}
std::vector<float> noise(std::size_t count) {
  std::vector<float> samples;
  std::uint32_t state = 1;
  for (std::size_t i = 0; i < count; ++i) {
    state = state * 1664525u + 1013904223u;
    samples.push_back(static_cast<float>(state >> 8) * 0x1p-24f - 0.5f);
  }
  return samples;
}

TEST(Mel, SilenceIsTheLowestValue) {
  const std::vector<float> samples(6400, 0.0f);
  const Mel mel(samples);
  EXPECT_EQ(mel.frames(), 10);
  EXPECT_EQ(mel.rows(), 33);
  for (const float v : mel.rows(0, mel.rows())) EXPECT_EQ(v, -4.0f);
}

// Band 40 of one row, by a plain Fourier sum.
TEST(Mel, IsWhatItsDefinitionSays) {
  const std::vector<float> samples = noise(3200);
  const Mel mel(samples);
  constexpr int row = 1, band = 40;  // reaches before the first sample
  const auto hz = [](double mels) {
    return mels < 15 ? mels * 200 / 3 : 1000 * std::pow(6.4, (mels - 15) / 27);
  };
  const double low = 55 * 3.0 / 200, high = 15 + 27 * std::log(7.6) / std::log(6.4);
  const auto edge = [&](int i) { return hz(low + (high - low) * i / 81); };
  double sum = 0;
  for (int k = 0; k <= 400; ++k) {
    const double f = 20.0 * k;
    const double height = std::min((f - edge(band)) / (edge(band + 1) - edge(band)),
                                   (edge(band + 2) - f) / (edge(band + 2) - edge(band + 1)));
    if (height <= 0) continue;
    std::complex<double> bin = 0;
    for (int i = 0; i < 800; ++i) {
      const int t = row * 200 - 400 + i;
      if (t < 0) continue;
      const auto at = static_cast<std::size_t>(t);
      const double value = samples[at] - (t > 0 ? 0.97 * samples[at - 1] : 0.0);
      bin += value * (0.5 - 0.5 * std::cos(2 * M_PI * i / 800)) *
             std::polar(1.0, -2 * M_PI * k * i / 800);
    }
    sum += height * 2 / (edge(band + 2) - edge(band)) * std::abs(bin);
  }
  const double expected = 8 * ((20 * std::log10(sum) - 20 + 100) / 100) - 4;
  ASSERT_LT(std::abs(expected), 4);
  EXPECT_NEAR(mel.rows(row, 1)[band], expected, 1e-5);
}

TEST(Mel, ATonesBandIsTheLoudest) {
  const std::vector<float> samples = tone(1000, 16000);
  const Mel mel(samples);
  const std::vector<float> row = mel.rows(40, 1);
  const auto loudest = std::ranges::max_element(row) - row.begin();
  // 1 kHz is 15 mels; the bands' centres lie 81 to the range of 0.825 to 44.5 mels.
  EXPECT_NEAR(static_cast<double>(loudest), (15 - 0.825) / (44.5 - 0.825) * 81 - 1, 1.0);
}

TEST(Mel, WindowsStartWhereTheyShould) {
  const std::int64_t starts[] = {-6, -3, 0, 3, 6, 9, 12, 16};
  for (std::int64_t i = 0; i < 8; ++i) EXPECT_EQ(mel_window_start(i), starts[i]) << i;
  const std::vector<float> samples = noise(640 * 30);
  const Mel mel(samples);
  const std::vector<float> rows = mel.rows(0, mel.rows());
  const std::vector<float> windows = mel.windows(0, mel.frames());
  for (std::int64_t frame = 0; frame < mel.frames(); ++frame)
    for (std::int64_t band = 0; band < mel_bands; ++band)
      for (std::int64_t i = 0; i < mel_window; ++i) {
        const std::int64_t row =
            std::clamp<std::int64_t>(mel_window_start(frame) + i, 0, mel.rows() - 1);
        ASSERT_EQ(windows[(frame * mel_bands + band) * mel_window + i],
                  rows[row * mel_bands + band]);
      }
}

TEST(Mel, PiecesAreTheWhole) {
  const std::vector<float> samples = noise(640 * 50 + 333);  // with a part of a frame
  const Mel mel(samples);
  ASSERT_EQ(mel.frames(), 50);
  const std::vector<float> whole = mel.windows(0, 50);
  std::vector<float> pieces;
  for (const auto& [first, count] : {std::pair(0, 1), {1, 31}, {32, 18}}) {
    const std::vector<float> some = mel.windows(first, count);
    pieces.insert(pieces.end(), some.begin(), some.end());
  }
  EXPECT_EQ(pieces, whole);
  const std::vector<float> cut(samples.begin(), samples.begin() + 640 * 50);
  EXPECT_EQ(Mel(cut).windows(0, 50), whole);
}

// Blinks that the seed draws.

TEST(Blink, ShortClipsHaveNone) {
  for (const int T : {1, 2, 20, 21})
    EXPECT_EQ(random_blinks(T, 3), std::vector<float>(T, 0.0f)) << T;
}

TEST(Blink, TwentyTwoFramesLeaveOneChoice) {
  std::vector<float> expected(22, 0.0f);
  const float closed[] = {0.5f, 0.9f, 1.0f, 0.9f, 0.5f};
  std::copy(std::begin(closed), std::end(closed), expected.begin() + 10);
  for (const std::uint64_t seed : {0, 1, 99}) EXPECT_EQ(random_blinks(22, seed), expected);
}

TEST(Blink, AreFiveFramesLongAndTenOrMoreApart) {
  std::set<std::int64_t> pauses;
  for (std::uint64_t seed = 0; seed < 50; ++seed) {
    constexpr std::int64_t T = 300;
    const std::vector<float> eyes = random_blinks(T, seed);
    ASSERT_EQ(std::ssize(eyes), T);
    std::int64_t open = 0, blinks = 0;
    for (std::size_t t = 0; t < eyes.size();) {
      if (eyes[t] == 0) {
        ++open;
        ++t;
        continue;
      }
      EXPECT_GE(open, 10);
      EXPECT_LT(open, 70);
      pauses.insert(open);
      ASSERT_LT(t + 5, eyes.size());  // the last frame is never part of one
      for (const float closed : {0.5f, 0.9f, 1.0f, 0.9f, 0.5f}) EXPECT_EQ(eyes[t++], closed);
      open = 0;
      ++blinks;
    }
    EXPECT_GE(blinks, 1);
  }
  EXPECT_GT(pauses.size(), 30u);
}

TEST(Blink, SeedsDecide) {
  EXPECT_EQ(random_blinks(500, 7), random_blinks(500, 7));
  EXPECT_NE(random_blinks(500, 7), random_blinks(500, 8));
}

// Savitzky-Golay's filter against what is known of it.

TEST(Smoothing, WindowsOfShortClipsAreOdd) {
  EXPECT_EQ(smoothing_window(1000), 13);
  EXPECT_EQ(smoothing_window(13), 13);
  EXPECT_EQ(smoothing_window(12), 11);
  EXPECT_EQ(smoothing_window(4), 3);
  EXPECT_EQ(smoothing_window(3), 3);
}

TEST(Smoothing, ParabolasStay) {
  for (const int T : {3, 4, 5, 12, 13, 14, 40}) {
    std::vector<float> values;
    for (int t = 0; t < T; ++t) {
      const auto x = static_cast<float>(t);
      values.insert(values.end(), {0.25f * x * x - 3 * x + 1, 2 - 0.5f * x});
    }
    const std::vector<float> before = values;
    smooth_motion(values, 2);
    for (std::size_t i = 0; i < values.size(); ++i) EXPECT_NEAR(values[i], before[i], 2e-4) << T;
  }
}

// The tabulated weights of five points: -3, 12, 17, 12, -3 over 35; and, at the ends, those of the
// parabola through the first five.
TEST(Smoothing, AnImpulseShowsTheWeights) {
  std::vector<float> values = {0, 0, 1, 0, 0, 0};
  smooth_motion(values, 1);
  const double expected[] = {-3.0 / 35, 12.0 / 35, 17.0 / 35, 12.0 / 35};
  EXPECT_NEAR(values[0], -3.0 / 35, 1e-6);
  EXPECT_NEAR(values[1], 12.0 / 35, 1e-6);
  EXPECT_NEAR(values[2], expected[2], 1e-6);
  EXPECT_NEAR(values[3], expected[3], 1e-6);
  std::vector<float> first = {1, 0, 0, 0, 0, 0};
  smooth_motion(first, 1);
  EXPECT_NEAR(first[0], 31.0 / 35, 1e-6);
  EXPECT_NEAR(first[1], 9.0 / 35, 1e-6);
  EXPECT_NEAR(first[2], -3.0 / 35, 1e-6);
  EXPECT_EQ(first[3], 0);
}

TEST(Smoothing, TooFewFramesStayAsTheyAre) {
  for (std::vector<float> values : {std::vector<float>{1, 5}, {1, 5, -7, 2}}) {
    const std::vector<float> before = values;
    smooth_motion(values, 2);
    EXPECT_EQ(values, before);
  }
}

// The networks between speech and motion, with weights drawn at random.

std::vector<float> random_values(std::int64_t count, std::uint32_t state = 1) {
  std::vector<float> values;
  for (std::int64_t i = 0; i < count; ++i) {
    state = state * 1664525u + 1013904223u;
    values.push_back(static_cast<float>(state >> 8) * 0x1p-24f - 0.5f);
  }
  return values;
}
std::span<const float> rows_of(const std::vector<float>& all, std::int64_t first,
                               std::int64_t count, std::int64_t width) {
  return std::span(all).subspan(first * width, count * width);
}
std::vector<float> copy(std::span<const float> s) { return {s.begin(), s.end()}; }

class WithArena : public testing::Test {
 protected:
  std::unique_ptr<Arena> arena_ = Arena::reserve(std::size_t{1} << 30);
  ArenaScope scope_{*arena_};
};

using RowStride = WithArena;

// A stride over rows alone is the plain convolution with rows left out.
TEST_F(RowStride, IsThePlainConvolutionsEveryNthRow) {
  ParameterTable table;
  ConvNet net(table, "");
  const ConvLayer* conv = net.add("conv", "norm", 5, 8, ops::Conv::same(3), true);
  table.allocate_for_inference(false);
  table.initialise(3);
  net.fold();
  for (const auto& [H, rows, columns] : {std::tuple(80, 3, 1), {9, 3, 2}, {32, 2, 1}}) {
    constexpr std::int64_t N = 2, W = 6;
    const Tensor x =
        Tensor::from_host(std::span<const float>(random_values(N * H * W * 5)), {N, 1, H, W, 5});
    const Tensor all = convolve(*conv, x, 0.25f);
    const Tensor some = RowStrideConv(*conv, rows, columns)(x, 0.25f);
    ASSERT_EQ(some.shape(), (Shape{N, 1, (H - 1) / rows + 1, (W - 1) / columns + 1, 8}));
    for (std::int64_t n = 0; n < N; ++n)
      for (std::int64_t y = 0; y < some.dim(2); ++y)
        for (std::int64_t c = 0; c < some.dim(3); ++c)
          for (std::int64_t k = 0; k < 8; ++k)
            ASSERT_NEAR(some.span<float>()[((n * some.dim(2) + y) * some.dim(3) + c) * 8 + k],
                        all.span<float>()[((n * H + y * rows) * W + c * columns) * 8 + k], 1e-5);
  }
}

class Pose : public WithArena {
 protected:
  Pose() {
    table_.allocate_for_inference(false);
    table_.initialise(5);
    net_.fold();
  }
  std::vector<float> poses(std::int64_t T, std::int64_t style = 0) const {
    return net_.poses(rows_of(heard_, 0, T, 6), reference_, rows_of(z_, 0, pose_calls(T), 64),
                      style);
  }

  ParameterTable table_;
  PoseVae net_{table_};
  std::vector<float> heard_ = random_values(200 * 6), reference_ = random_values(6, 7),
                     z_ = draw_pose_latents(200, 11);
};

TEST_F(Pose, CallsCoverTheFrames) {
  EXPECT_EQ(pose_calls(1), 0);
  EXPECT_EQ(pose_calls(2), 1);
  EXPECT_EQ(pose_calls(33), 1);
  EXPECT_EQ(pose_calls(34), 2);
  EXPECT_EQ(pose_calls(65), 2);
  for (const std::int64_t T : {1, 2, 32, 33, 34, 65, 100}) {
    const std::vector<float> all = poses(T);
    ASSERT_EQ(std::ssize(all), T * 6);
    EXPECT_EQ(copy(rows_of(all, 0, 1, 6)), reference_);
    for (const float v : all) EXPECT_TRUE(std::isfinite(v));
  }
}

TEST_F(Pose, FullCallsDoNotDependOnWhatFollows) {
  const std::vector<float> shorter = poses(33), longer = poses(80);
  EXPECT_EQ(copy(rows_of(shorter, 0, 33, 6)), copy(rows_of(longer, 0, 33, 6)));
  EXPECT_NE(copy(rows_of(poses(40), 33, 7, 6)), copy(rows_of(longer, 33, 7, 6)));
}

// The last call of 40 frames hears frames 8 to 39, with the second row of z.
TEST_F(Pose, TheLastCallEndsWithTheClip) {
  const std::vector<float> all = poses(40);
  const std::vector<float> heard = copy(rows_of(heard_, 7, 33, 6));
  const std::vector<float> alone = net_.poses(heard, reference_, rows_of(z_, 1, 1, 64), 0);
  EXPECT_EQ(copy(rows_of(all, 33, 7, 6)), copy(rows_of(alone, 26, 7, 6)));
}

TEST_F(Pose, ShortClipsRepeatTheirFirstFrame) {
  const std::vector<float> all = poses(10);
  std::vector<float> padded = copy(rows_of(heard_, 0, 1, 6));
  for (int i = 0; i < 32 - 9; ++i) {
    const auto first = rows_of(heard_, 1, 1, 6);
    padded.insert(padded.end(), first.begin(), first.end());
  }
  const auto rest = rows_of(heard_, 1, 9, 6);
  padded.insert(padded.end(), rest.begin(), rest.end());
  const std::vector<float> longer = net_.poses(padded, reference_, rows_of(z_, 0, 1, 64), 0);
  EXPECT_EQ(copy(rows_of(all, 1, 9, 6)), copy(rows_of(longer, 24, 9, 6)));
}

TEST_F(Pose, StylesAndSeedsMoveTheHead) {
  EXPECT_NE(poses(20, 0), poses(20, 45));
  EXPECT_EQ(draw_pose_latents(100, 11), copy(rows_of(z_, 0, pose_calls(100), 64)));
  EXPECT_NE(draw_pose_latents(100, 12), draw_pose_latents(100, 11));
  double sum = 0, squares = 0;
  for (const float v : z_) {
    sum += v;
    squares += v * v;
  }
  const auto n = static_cast<double>(z_.size());
  EXPECT_NEAR(sum / n, 0, 0.15);
  EXPECT_NEAR(squares / n, 1, 0.25);
}

class Speech : public WithArena {
 protected:
  std::vector<float> rows(std::int64_t frames, const MotionOptions& options = {}) {
    return motion_.rows(rows_of(samples_, 0, frames, speech_samples_per_frame), source_, options);
  }

  Deck deck_;
  SpeechMotion motion_{deck_, ModelSource("animate.weights", "random:1", "", false, MPI_COMM_SELF)};
  std::vector<float> samples_ = random_values(50 * speech_samples_per_frame),
                     source_ = random_values(73, 3);
};

TEST_F(Speech, LessThanAFrameIsRefused) {
  EXPECT_EQ(SpeechMotion::frames(640), 1);
  EXPECT_EQ(SpeechMotion::frames(1279), 1);
  try {
    motion_.rows(std::span(samples_).first(639), source_);
    FAIL();
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), Exit::data);
  }
  EXPECT_EQ(rows(1).size(), 70u);
  EXPECT_EQ(rows(2).size(), 140u);
}

TEST_F(Speech, AFramesExpressionDoesNotDependOnTheLength) {
  // Mel windows reach 14 rows, or 5 frames, ahead; eyes stay open so that blinks are alike.
  const std::vector<float> open(50, 0.0f);
  const std::vector<float> longer = rows(50, {.blink = open}),
                           shorter = rows(40, {.blink = std::span(open).first(40)});
  for (std::int64_t t = 0; t < 34; ++t)
    EXPECT_EQ(copy(rows_of(longer, t, 1, 70).first(64)), copy(rows_of(shorter, t, 1, 70).first(64)))
        << t;
  EXPECT_EQ(rows(50, {.blink = open}), longer);
}

TEST_F(Speech, VideosReplaceBlinksAndMoveTheHead) {
  const std::vector<float> plain = rows(25), video = random_values(3 * 70, 9);
  // Pose: that of the speech plus the video's, relative to its first frame, over and over.
  const std::vector<float> moved = rows(25, {.pose = video});
  for (std::int64_t t = 0; t < 25; ++t)
    for (std::int64_t i = 0; i < 70; ++i) {
      const auto at = static_cast<std::size_t>(t * 70 + i);
      const float added = i < 64 ? 0 : video[t % 3 * 70 + i] - video[i];
      EXPECT_NEAR(moved[at], plain[at] + added, 1e-6);
    }
  // Expression: the eyes' closing is 0, and the video's frames are the references.
  const std::vector<float> seen = rows(25, {.eyeblink = video});
  const std::vector<float> open(25, 0.0f);
  std::vector<float> own;
  for (int i = 0; i < 3; ++i) own.insert(own.end(), source_.begin(), source_.begin() + 70);
  EXPECT_NE(seen, plain);
  EXPECT_EQ(rows(25, {.eyeblink = own}), rows(25, {.blink = open}));
  for (std::int64_t t = 0; t < 25; ++t)
    EXPECT_EQ(copy(rows_of(seen, t, 1, 70).last(6)), copy(rows_of(plain, t, 1, 70).last(6)));
}

TEST_F(Speech, PlansItsMemory) {
  const MemoryNeed need = motion_.plan();
  arena_->reset_peak();
  rows(33);
  EXPECT_GT(need.bytes, 0u);
  // What a run takes above the plan is the copies of what goes in.
  EXPECT_LE(arena_->peak(), need.bytes + (1 << 20));
}

TEST_F(Speech, StylesAreChecked) {
  EXPECT_THROW(rows(5, {.pose_style = 46}), Error);
  EXPECT_THROW(rows(5, {.pose_style = -1}), Error);
}

}  // namespace
}  // namespace weft::test
