// The networks between speech and motion, with weights drawn at random.
#include "models/sadtalker/speech/pose_vae.h"

#include <gtest/gtest.h>

#include <cmath>

#include "core/error.h"
#include "models/sadtalker/speech/speech_motion.h"
#include "tensor/tensor.h"

namespace weft {
namespace {

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
  return std::span(all).subspan(static_cast<std::size_t>(first * width),
                                static_cast<std::size_t>(count * width));
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
  FoldedNet net(table, "");
  const FoldedConv* conv = net.add("conv", "norm", 5, 8, ops::Conv::same(3), true);
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
            ASSERT_NEAR(some.span<float>()[static_cast<std::size_t>(
                            ((n * some.dim(2) + y) * some.dim(3) + c) * 8 + k)],
                        all.span<float>()[static_cast<std::size_t>(
                            ((n * H + y * rows) * W + c * columns) * 8 + k)],
                        1e-5);
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
      const float added = i < 64 ? 0
                                 : video[static_cast<std::size_t>(t % 3 * 70 + i)] -
                                       video[static_cast<std::size_t>(i)];
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
}  // namespace weft
